//! READMEs, documents and comments use the words of the field, so that a reader finds what they search for.

use std::collections::BTreeMap;

use crate::files;

/// Phrases of this project's past, and what the field says.
const PHRASES: &[(&str, &str)] = &[
    ("parts of k", "split-K slices, partial sums"),
    ("planes", "partial sums"),
    ("becomes of", "epilogue, store mode"),
    ("on their way", "in flight"),
    ("on its way", "in flight; fused"),
    ("asked for ahead", "prefetched"),
    ("asked for early", "prefetched"),
    ("two in turn", "double-buffered"),
    ("by vectors", "vectorized"),
    ("by elements", "scalar path"),
    ("the bits it has alone", "batch-invariant"),
    ("bits that it has alone", "batch-invariant"),
    ("rows in hand", "rows per thread"),
    ("abreast", "rows per block"),
    ("whole lines", "coalesced 128-byte accesses"),
    ("fight over banks", "bank conflict"),
    ("how eager", "wave priority"),
    ("stays in order", "scheduling barrier"),
    ("stay in order", "scheduling barrier"),
    ("anew", "again; reload"),
    ("of its own accord", "by default"),
    ("a lone", "a single"),
    ("reckoned", "considered"),
    ("product of few rows", "skinny GEMM"),
    ("products of few rows", "skinny GEMMs"),
    ("product of matrices", "GEMM"),
    ("products of matrices", "GEMMs"),
    ("waits that drain", "full drain"),
    ("packed words", "packed scales"),
    ("words of scales", "packed scales"),
    ("quantized codes", "quantized values"),
];

/// Whether `text`, in lower case, has `phrase` as whole words.
fn has(text: &str, phrase: &str) -> bool {
    text.match_indices(phrase).any(|(at, _)| {
        !text[..at].ends_with(char::is_alphanumeric)
            && !text[at + phrase.len()..].starts_with(char::is_alphanumeric)
    })
}

#[test]
fn comments_and_documents_use_the_words_of_the_field() {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    // The changelog has the old words.
    for file in files::all().into_iter().filter(|file| file.path != "CHANGELOG.md") {
        for (n, line) in files::comments(&file) {
            let line = line.to_lowercase();
            for (phrase, better) in PHRASES.iter().filter(|(phrase, _)| has(&line, phrase)) {
                let package = found.entry(file.package().to_owned()).or_default();
                package.push(format!("{}:{n}: `{phrase}`: {better}", file.path));
            }
        }
    }
    files::assert_none(&found);
}

#[test]
fn phrases_are_whole_words() {
    assert!(has("two rows abreast.", "abreast"));
    assert!(has("a lone wave", "a lone"));
    assert!(!has("that alone", "a lone") && !has("airplanes", "planes"));
}
