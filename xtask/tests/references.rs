//! Comments name files that exist, and symbols that those files contain.
//!
//! The forms are a name in backquotes, then "in" or "of", then a path, with backquotes or without; and a path that stands
//! alone. A path is looked for beside the file,
//! in the folders of its package, below its include directories and those of hk-core and hk-gemm, and in the workspace.

use std::collections::{BTreeMap, HashMap};

use crate::files;

/// Where a path may start, for a file of `crates/NAME`.
fn places(file: &files::File) -> Vec<String> {
    let own = match file.path.strip_prefix("crates/") {
        Some(rest) => format!("crates/{}/", rest.split('/').next().unwrap_or("")),
        None => format!("{}/", file.package()),
    };
    let beside = file.path.rsplit_once('/').map_or(String::new(), |(dir, _)| format!("{dir}/"));
    let mut places = vec![beside];
    places.extend(
        ["", "src/", "src/bin/", "hip/", "hip/include/", "tests/", "benches/"]
            .map(|dir| format!("{own}{dir}")),
    );
    places.extend(["hk-core", "hk-gemm"].map(|name| format!("crates/{name}/hip/include/")));
    places.extend(["crates/".into(), String::new()]);
    places
}

/// `a/./b/../c` is `a/c`.
fn normal(path: &str) -> String {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn is_path(text: &str) -> bool {
    let name = text.rsplit('/').next().unwrap_or("");
    let known = name.rsplit_once('.').is_some_and(|(stem, extension)| {
        let placeholder = stem.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        !stem.is_empty() && !placeholder && ["rs", "h", "hip", "py", "c"].contains(&extension)
    });
    let placeholder =
        text.split('/').any(|part| part == "NAME" || part == "OP" || part == "..." || part == "FAMILY");
    known && !placeholder && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
}

/// The name that a file must contain for a symbol such as `Rows::load()`, `kernel<T>` or `#define X`.
fn symbol(text: &str) -> Option<&str> {
    let text = text.split(['(', '<', '!', '[']).next()?.trim_end_matches("::");
    let name = text.rsplit(['.', ':', ' ']).next()?;
    let word = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    (word && !is_path(text)).then_some(name)
}

/// `text` in pieces: prose, and what is in backquotes or is a path without them.
fn pieces(text: &str) -> Vec<(bool, &str)> {
    let mut pieces = Vec::new();
    for (n, piece) in text.split('`').enumerate() {
        if n % 2 == 1 {
            pieces.push((true, piece));
            continue;
        }
        let mut start = 0;
        for word in piece.split_whitespace() {
            let path = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
            if is_path(path) {
                let at = path.as_ptr().addr() - piece.as_ptr().addr();
                pieces.extend([(false, &piece[start..at]), (true, path)]);
                start = at + path.len();
            }
        }
        pieces.push((false, &piece[start..]));
    }
    pieces
}

/// What `text` (comment lines joined by blanks) says of files: a symbol, if there is one, and the path.
fn references(text: &str) -> Vec<(Option<&str>, &str)> {
    let pieces = pieces(text);
    // What is between two names must be one of these words.
    let linked = |at: usize, words: &[&str]| {
        at >= 2
            && pieces[at].0
            && !pieces[at - 1].0
            && pieces[at - 2].0
            && words.contains(&pieces[at - 1].1.trim())
    };
    let mut found = Vec::new();
    for at in (0..pieces.len()).filter(|&at| pieces[at].0 && is_path(pieces[at].1)) {
        let path = pieces[at].1;
        let mut symbols = Vec::new();
        if linked(at, &["in", "of", "from"]) {
            symbols.extend(symbol(pieces[at - 2].1));
            // Two names joined by a word have one path.
            if linked(at - 2, &["and", "or"]) {
                symbols.extend(symbol(pieces[at - 4].1));
            }
        }
        match symbols.is_empty() {
            false => found.extend(symbols.into_iter().map(|s| (Some(s), path))),
            // A bare name of a file may be of any folder.
            true if path.contains('/') => found.push((None, path)),
            true => {}
        }
    }
    found
}

fn has_word(text: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(part) && !text[at + word.len()..].starts_with(part))
}

/// Whether a file has a symbol. A type or constant of Rust must be defined there: a file that only imports it is the wrong one.
fn has_symbol(path: &str, text: &str, symbol: &str) -> bool {
    if !path.ends_with(".rs") || !symbol.starts_with(|c: char| c.is_ascii_uppercase()) {
        return has_word(text, symbol);
    }
    let keywords = ["struct", "enum", "union", "trait", "type", "const", "static", "macro_rules!"];
    text.lines().map(str::trim_start).any(|line| {
        // A variant or an associated item may begin its line.
        let first = line.split(|c: char| !c.is_alphanumeric() && c != '_').next() == Some(symbol);
        first
            || keywords.iter().any(|k| {
                has_word(line, &format!("{k} {symbol}")) || has_word(line, &format!("{k} mut {symbol}"))
            })
    })
}

/// Runs of adjacent comment lines, joined, with the number of the first.
fn blocks(file: &files::File) -> Vec<(usize, String)> {
    let mut blocks: Vec<(usize, usize, String)> = Vec::new();
    for (n, line) in files::comments(file) {
        match blocks.last_mut() {
            Some((_, last, text)) if *last + 1 == n => {
                *last = n;
                text.push(' ');
                text.push_str(line.trim());
            }
            _ => blocks.push((n, n, line.trim().to_owned())),
        }
    }
    blocks.into_iter().map(|(first, _, text)| (first, text)).collect()
}

#[test]
fn comments_name_files_and_symbols_that_exist() {
    let files = files::all();
    let by_path: HashMap<&str, &str> = files.iter().map(|f| (&*f.path, &*f.text)).collect();
    let mut wrong: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut checked = 0;
    for file in &files {
        for (line, text) in blocks(file) {
            for (symbol, path) in references(&text) {
                checked += 1;
                let candidates: Vec<&str> = places(file)
                    .iter()
                    .filter_map(|place| by_path.get(&*normal(&format!("{place}{path}"))).copied())
                    .collect();
                let problem = match symbol {
                    _ if candidates.is_empty() => format!("no file `{path}`"),
                    Some(symbol) if !candidates.iter().any(|text| has_symbol(path, text, symbol)) => {
                        format!("no `{symbol}` in `{path}`")
                    }
                    _ => continue,
                };
                let package = wrong.entry(file.package().to_owned()).or_default();
                package.push(format!("{}:{line}: {problem}", file.path));
            }
        }
    }
    assert!(checked > 50, "{checked} references");
    files::assert_none(&wrong);
}

#[test]
fn references_are_read_from_comments() {
    let text = "As `Params` in `src/rmsnorm.rs` and `hk::Row<T>` of `hk/reg.h`; `A` and `B::b()` in `x.rs`, `f32` in `y`.";
    let want = [
        (Some("Params"), "src/rmsnorm.rs"),
        (Some("Row"), "hk/reg.h"),
        (Some("b"), "x.rs"),
        (Some("A"), "x.rs"),
    ];
    assert_eq!(references(text), want);
    assert_eq!(references("as `TILES` in src/tiles.rs. See b.h."), [(Some("TILES"), "src/tiles.rs")]);
    assert_eq!(references("the files `hip/a.hip`, `b.rs` and `hip/NAME.hip`"), [(None, "hip/a.hip")]);
    assert_eq!(normal("crates/a/../b/./c.rs"), "crates/b/c.rs");
    assert!(
        has_symbol("a.rs", "pub struct Params {\n", "Params") && has_symbol("a.h", "use(Params)", "Params")
    );
    assert!(
        !has_symbol("a.rs", "use crate::Params;\n", "Params") && has_symbol("a.rs", "    Bf16 = 1,", "Bf16")
    );
    assert!(has_word("struct Params {", "Params") && !has_word("struct RmsParams {", "Params"));
}
