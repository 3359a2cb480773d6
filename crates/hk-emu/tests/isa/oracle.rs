//! Decoder and disassembler against `llvm-mc`: generated instances of every opcode and form, and random words.

use crate::isa::generator::Generator;
use crate::isa::llvm;
use hk_codeobj::Arch;
use hk_emu::isa::{ALL_OPS, Encoding, decode, display};
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};

/// Compares one batch; returns a description of each difference.
fn differences(arch: Arch, sequences: &[Vec<u32>]) -> Vec<String> {
    // Our decoder says how long each instance is; LLVM gets exactly those words.
    let decoded: Vec<_> = sequences.iter().map(|w| decode(arch, w)).collect();
    let cut: Vec<Vec<u32>> = sequences
        .iter()
        .zip(&decoded)
        .map(|(w, d)| d.as_ref().map_or(w.clone(), |i| w[..usize::from(i.size) / 4].to_vec()))
        .collect();
    let texts = llvm::disassemble(arch.name(), &cut);
    let mut found = vec![];
    for ((words, decoded), text) in cut.iter().zip(&decoded).zip(&texts) {
        // Illegal fields: LLVM is stricter than the hardware in places and laxer in others; only what it
        // prints counts.
        let Some(text) = text else { continue };
        let ours = match decoded {
            Ok(inst) => llvm::one_line(&display(inst).to_string()),
            Err(e) => format!("error: {e}"),
        };
        if ours != llvm::one_line(text) {
            found.push(format!("{words:08x?}\n  llvm {}\n  ours {ours}", llvm::one_line(text)));
        }
    }
    found
}

#[test]
fn every_opcode_and_form_reads_as_llvm_prints_it() {
    let per_form: usize = std::env::var("HK_ISA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(24);
    for arch in Arch::AMD {
        let mut generator = Generator::new(7);
        let mut sequences = vec![];
        for &op in ALL_OPS.iter().filter(|op| op.info().exists_on(arch)) {
            let has_two_forms =
                matches!(op.info().encoding, Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc);
            for _ in 0..per_form {
                sequences.push(generator.instance(op, false));
                if has_two_forms {
                    sequences.push(generator.instance(op, true));
                }
            }
        }
        let found = differences(arch, &sequences);
        let show =
            found.len().min(std::env::var("HK_ISA_SHOW").ok().and_then(|n| n.parse().ok()).unwrap_or(20));
        assert!(
            found.is_empty(),
            "{arch}: {} of {} instances differ:\n{}",
            found.len(),
            sequences.len(),
            found[..show].join("\n")
        );
    }
}

#[test]
fn random_words_never_panic() {
    let mut rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[3; 32]);
    for _ in 0..2_000_000 {
        let words = [rng.next_u32(), rng.next_u32(), rng.next_u32(), rng.next_u32()];
        for arch in Arch::AMD {
            for n in [1, 4] {
                if let Ok(inst) = decode(arch, &words[..n]) {
                    std::hint::black_box(display(&inst).to_string().len());
                }
            }
        }
    }
}
