//! The modules of the crate depend on each other in one direction.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Module paths (`exec::ds`) and sources below `dir`, without comments and unit tests.
fn read(dir: &Path, prefix: &str, modules: &mut BTreeMap<String, String>) {
    for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if path.is_dir() {
            read(&path, &format!("{prefix}{stem}::"), modules);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
            let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap()).collect();
            let name =
                if stem == "mod" { prefix.trim_end_matches("::").into() } else { format!("{prefix}{stem}") };
            modules.insert(name, code.join(" "));
        }
    }
}

/// The paths of a tree of imports, `a::{b, c::d}`, up to its end in `text`; and how long it is.
fn paths(text: &str, prefix: &str, found: &mut Vec<String>) -> usize {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').unwrap_or(text.len());
    let path = format!("{prefix}{}", &text[..end]);
    if !path.ends_with("::") || !text[end..].starts_with('{') {
        found.push(path);
        return end;
    }
    let mut at = end + 1;
    while let Some(c) = text[at..].chars().next().filter(|&c| c != '}') {
        at += if c.is_alphanumeric() || c == '_' { paths(&text[at..], &path, found) } else { c.len_utf8() };
    }
    (at + 1).min(text.len())
}

/// The modules among `known` that `module` names.
fn dependencies(module: &str, text: &str, known: &BTreeSet<String>) -> BTreeSet<String> {
    let mut found = vec![];
    for start in ["crate::", "super::"] {
        for (at, _) in text.match_indices(start).filter(|(at, _)| !text[..*at].ends_with([':', '_'])) {
            paths(&text[at..], "", &mut found);
        }
    }
    let absolute = found.iter().map(|path| {
        let mut base: Vec<&str> =
            if path.starts_with("super") { module.split("::").collect() } else { vec![] };
        for part in path.split("::").filter(|&part| part != "crate") {
            match part {
                "super" => base.truncate(base.len().saturating_sub(1)),
                part => base.push(part),
            }
        }
        base.join("::")
    });
    let resolved = absolute.filter_map(|path| {
        let ends = path.match_indices("::").map(|(at, _)| at).chain([path.len()]);
        ends.map(|end| &path[..end]).filter(|name| known.contains(*name)).last().map(String::from)
    });
    resolved.filter(|name| name != module).collect()
}

#[test]
fn no_module_depends_on_itself_through_others() {
    let mut modules = BTreeMap::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut modules);
    // The root re-exports; proof.rs is a test.
    modules.retain(|name, _| name != "lib" && name != "observe::proof");
    let known: BTreeSet<String> = modules.keys().cloned().collect();
    let mut graph: BTreeMap<String, BTreeSet<String>> =
        modules.iter().map(|(name, text)| (name.clone(), dependencies(name, text, &known))).collect();
    let edges: usize = graph.values().map(BTreeSet::len).sum();
    assert!(graph.len() > 40 && edges > 150, "{} modules, {edges} dependencies", graph.len());
    while let Some(leaf) = graph.iter().find(|(_, to)| to.is_empty()).map(|(name, _)| name.clone()) {
        graph.remove(&leaf);
        for to in graph.values_mut() {
            to.remove(&leaf);
        }
    }
    assert!(graph.is_empty(), "a circle of modules among {graph:#?}");
}

#[test]
fn dependencies_are_read() {
    let known: BTreeSet<String> = ["exec", "exec::ds", "isa", "wave"].map(String::from).into();
    let text =
        "use crate::{isa::{Inst, op}, wave}; use super::mem::{load, store}; fn f() { crate::exec::ds::g(); }";
    let found: Vec<String> = dependencies("exec::valu", text, &known).into_iter().collect();
    assert_eq!(found, ["exec", "exec::ds", "isa", "wave"]);
}
