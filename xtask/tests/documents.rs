//! READMEs are short, and links between documents lead somewhere.

use std::collections::BTreeMap;

use crate::files;

/// Lines of the README of the workspace, and of one of a crate.
const README: usize = 150;
const CRATE_README: usize = 120;

#[test]
fn readmes_are_short() {
    let mut long: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files::all() {
        let limit = match file.path.as_str() {
            "README.md" => README,
            path if path.ends_with("/README.md") => CRATE_README,
            _ => continue,
        };
        // One finding for each line too many.
        let extra = file.text.lines().count().saturating_sub(limit);
        if extra > 0 {
            let findings = (1..=extra).map(|n| format!("{}:{}", file.path, limit + n)).collect();
            long.insert(file.package().to_owned(), findings);
        }
    }
    files::assert_none(&long);
}

/// The headings of a document as GitHub links to them.
fn anchors(text: &str) -> Vec<String> {
    let headings =
        text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let kept = |c: char| c.is_alphanumeric() || c == ' ' || c == '-' || c == '_';
    headings
        .map(|h| h.to_lowercase().chars().filter(|&c| kept(c)).collect::<String>().replace(' ', "-"))
        .collect()
}

/// The targets of `[text](target)` outside of code.
fn links(file: &files::File) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (n, line) in files::comments(file) {
        let mut rest = line;
        while let Some((_, after)) = rest.split_once("](") {
            let Some((target, tail)) = after.split_once(')') else { break };
            found.push((n, target));
            rest = tail;
        }
    }
    found
}

#[test]
fn links_between_documents_lead_somewhere() {
    let all = files::all();
    let root = files::root();
    let mut broken: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut checked = 0;
    for file in all.iter().filter(|f| f.extension() == "md") {
        let dir = file.path.rsplit_once('/').map_or("", |(dir, _)| dir);
        for (n, target) in links(file) {
            let external = target.contains("://") || target.starts_with("mailto:");
            // Rust paths are rustdoc's to check.
            if external || target.contains("::") || target.split(['#', '.', '/']).all(|part| part.is_empty())
            {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            if !path.is_empty() && !path.contains(['.', '/']) && path != "LICENSE" {
                continue;
            }
            checked += 1;
            let to = if path.is_empty() { root.join(&file.path) } else { root.join(dir).join(path) };
            let text = std::fs::read_to_string(&to).ok();
            let there = match (to.exists(), anchor, text) {
                (true, "", _) => true,
                (true, anchor, Some(text)) => anchors(&text).iter().any(|a| a == anchor),
                _ => false,
            };
            if !there {
                let package = broken.entry(file.package().to_owned()).or_default();
                package.push(format!("{}:{n}: {target}", file.path));
            }
        }
    }
    assert!(checked >= 5, "{checked} links");
    files::assert_none(&broken);
}

#[test]
fn anchors_are_those_of_headings() {
    assert_eq!(anchors("# One: `two`, three\ntext\n## On an AMD GPU\n"), ["one-two-three", "on-an-amd-gpu"]);
}
