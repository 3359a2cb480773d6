//! What the emulator executes, and what has a model.

use std::collections::HashSet;
use std::sync::OnceLock;

use hk_emu::isa::{ALL_OPS, Encoding, Op};

use crate::common::{Assembly, Rig, assemble, options};

/// One legal encoding of an instruction, with registers that a kernel of 128 VGPRs and 128 AGPRs has.
fn words(op: Op) -> Vec<u32> {
    let info = op.info();
    let n = u32::from(info.opcode);
    let vgpr = |i: usize| 256 + 32 + 32 * i as u32;
    let sources = || {
        let mut fields = 0;
        for i in 0..3 {
            if info.src[i] != 0 {
                fields |= vgpr(i) << (9 * i);
            }
        }
        if op.reads_mask() {
            fields |= 32 << 18;
        }
        fields
    };
    match info.encoding {
        Encoding::Sop1 => vec![0xBE80_0000 | 16 << 16 | n << 8 | 32],
        Encoding::Sop2 => vec![0x8000_0000 | n << 23 | 16 << 16 | 40 << 8 | 32],
        Encoding::Sopc => vec![0xBF00_0000 | n << 16 | 40 << 8 | 32],
        // A register id that can be read and written; a literal where it takes one.
        Encoding::Sopk if op == Op::S_SETREG_IMM32_B32 => vec![0xB000_0000 | n << 23 | 1, 0],
        Encoding::Sopk => vec![0xB000_0000 | n << 23 | 16 << 16 | 1],
        Encoding::Sopp => vec![0xBF80_0000 | n << 16],
        Encoding::Smem => vec![0xC000_0000 | n << 18 | 1 << 17 | 48 << 6 | 16, 0],
        Encoding::Vop1 if op == Op::V_READFIRSTLANE_B32 => vec![0x7E00_0000 | 16 << 17 | n << 9 | 256 + 32],
        Encoding::Vop1 => vec![0x7E00_0000 | 8 << 17 | n << 9 | 256 + 32],
        Encoding::Vop2 => vec![n << 25 | 8 << 17 | 64 << 9 | 256 + 32, 0],
        Encoding::Vopc => vec![0x7C00_0000 | n << 17 | 64 << 9 | 256 + 32],
        Encoding::Vop3 if matches!(op, Op::V_READLANE_B32) => {
            vec![0xD000_0000 | n << 16 | 16, 40 << 9 | 256 + 32]
        }
        Encoding::Vop3 if matches!(op, Op::V_WRITELANE_B32) => vec![0xD000_0000 | n << 16 | 8, 40 << 9 | 33],
        Encoding::Vop3 => vec![0xD000_0000 | n << 16 | u32::from(op.writes_mask()) << 12 | 8, sources()],
        Encoding::Vop3p => vec![0xD380_0000 | n << 16 | 1 << 14 | 8, 3 << 27 | sources()],
        Encoding::Ds => vec![0xD800_0000 | n << 17, 8 << 24 | 48 << 16 | 32 << 8 | 24],
        Encoding::Flat | Encoding::Global | Encoding::Scratch => {
            let segment = match info.encoding {
                Encoding::Flat => 0,
                Encoding::Scratch => 1 << 14 | 1 << 13,
                _ => 2 << 14,
            };
            vec![0xDC00_0000 | n << 18 | segment, 8 << 24 | 0x7F << 16 | 32 << 8 | 24]
        }
        Encoding::Mubuf => vec![0xE000_0000 | n << 18 | 1 << 12, 128 << 24 | 8 << 16 | 32 << 8 | 24],
        Encoding::Mtbuf => {
            vec![0xE800_0000 | n << 15 | 1 << 12 | 4 << 19, 128 << 24 | 8 << 16 | 32 << 8 | 24]
        }
    }
}

fn executed_on(cpu: &str) -> HashSet<Op> {
    let arch = cpu.parse().expect("a known target");
    let ops: Vec<Op> = ALL_OPS.iter().copied().filter(|op| op.info().exists_on(arch)).collect();
    let mut body = String::new();
    // An indirect jump makes everything after it reachable.
    body += "  s_setpc_b64 s[4:5]\n";
    for op in &ops {
        // Two nops: an instruction that takes a literal finds one.
        let list: Vec<String> = words(*op).iter().map(|w| format!("{w:#x}")).collect();
        body += &format!("  .long {}\n", list.join(", "));
    }
    let image =
        assemble(&Assembly { cpu, body: &body, vgprs: 256, accum_offset: 128, ..Assembly::default() });
    let rig = Rig::new(options(cpu), &image);
    let unsupported = rig.machine.unsupported(&rig.module, "test").expect("the kernel is there");
    let mut missing = HashSet::new();
    for (at, text, reason) in unsupported {
        assert!(reason.contains("NoSemantics") || reason.contains("Unknown"), "{at:#x}: {text}: {reason}");
        let mnemonic = text.split_whitespace().next().unwrap_or("").to_uppercase();
        missing.insert(mnemonic.trim_end_matches("_E32").trim_end_matches("_E64").to_owned());
    }
    ops.into_iter().filter(|op| !missing.contains(op.info().name)).collect()
}

/// The instructions that the emulator executes on a target.
pub fn executed(cpu: &str) -> &'static HashSet<Op> {
    static SETS: [OnceLock<HashSet<Op>>; 2] = [OnceLock::new(), OnceLock::new()];
    SETS[usize::from(cpu == "gfx950")].get_or_init(|| executed_on(cpu))
}

#[test]
fn print_missing() {
    for cpu in ["gfx942", "gfx950"] {
        let set = executed(cpu);
        let arch = cpu.parse().unwrap();
        let missing: Vec<_> = ALL_OPS
            .iter()
            .filter(|op| op.info().exists_on(arch) && !set.contains(op))
            .map(|op| op.info().name)
            .collect();
        println!("{cpu}: {} executed, missing {missing:?}", set.len());
    }
}
