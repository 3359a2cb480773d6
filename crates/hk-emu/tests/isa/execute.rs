//! Whatever instructions a wave executes, with whatever operands: it ends, or its launch reports; nothing panics.

use crate::isa::generator::Generator;
use hk_codeobj::{Arch, CodeObject};
use hk_emu::isa::{ALL_OPS, Encoding, Fidelity, Op, decode};
use hk_emu::{Dispatch, Fault, Machine, MachineOptions};
use proptest::test_runner::{RngAlgorithm, TestRng};

/// Words of the part of the code that is replaced.
const ROOM: usize = 16;

/// A kernel whose registers hold the address of its buffer (`pointers`), or small numbers, and room for instructions.
struct Sandbox {
    image: Vec<u8>,
    /// File offset of the room.
    at: usize,
}

impl Sandbox {
    fn new(arch: Arch, pointers: bool) -> Sandbox {
        let mut body = String::from("  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  s_waitcnt lgkmcnt(0)\n");
        for i in (6..100).step_by(2) {
            body += &if pointers {
                format!("  s_mov_b64 s[{i}:{}], s[4:5]\n", i + 1)
            } else {
                format!("  s_movk_i32 s{i}, {}\n  s_movk_i32 s{}, 0\n", 8 * i, i + 1)
            };
        }
        for i in (2..256).step_by(2) {
            body += &if pointers {
                format!("  v_mov_b32 v{i}, s4\n  v_mov_b32 v{}, s5\n", i + 1)
            } else {
                format!("  v_lshlrev_b32 v{i}, 3, v0\n  v_mov_b32 v{}, {i}\n", i + 1)
            };
        }
        body += "  s_mov_b64 vcc, exec\n  s_movk_i32 m0, 0x40\n  .fill 16, 4, 0xBF800000\n";
        let image = crate::common::assemble(&crate::common::Assembly {
            cpu: arch.name(),
            body: &body,
            directives: ".amdhsa_reserve_vcc 1",
            vgprs: 512,
            accum_offset: 256,
            lds: 4096,
            scratch: 256,
        });
        let object = CodeObject::parse(&image).expect("it parses");
        let code = object.segments.iter().find(|s| s.executable).expect("code").file.clone();
        let nop = 0xBF80_0000u32.to_le_bytes().repeat(ROOM);
        let found = image[code.clone()].windows(nop.len()).position(|w| w == nop).expect("the room");
        Sandbox { at: code.start + found, image }
    }

    /// Launches one wave that executes `words`.
    fn run(&self, arch: Arch, words: &[u32]) -> Result<(), Fault> {
        let mut image = self.image.clone();
        for (i, word) in words.iter().enumerate().take(ROOM) {
            image[self.at + 4 * i..self.at + 4 * i + 4].copy_from_slice(&word.to_le_bytes());
        }
        let options = MachineOptions::default().arch(arch).threads(Some(1)).instruction_budget(Some(2_000));
        let machine = Machine::new(options);
        let module = machine.load(&image).expect("it loads");
        let data = machine.alloc(1 << 16, 256, "data").expect("memory");
        machine.fill(data, &[0; 4], 1 << 16).expect("zeros");
        let args = data.to_le_bytes();
        let dispatch = Dispatch { grid: [1, 1, 1], block: [64, 1, 1], dynamic_lds: 0, args: &args };
        machine.launch(&module, "test", &dispatch).map(drop)
    }
}

/// What a fault says of a form that the emulator lacks. Not of what the hardware lacks as well, or what a kernel does
/// wrong.
fn lacks(op: Op, arch: Arch, fault: &Fault) -> Option<String> {
    let Fault::NoSemantics { site, name, why } = fault else { return None };
    let illegal = [
        "a data format that does not exist",
        "a source that the target does not have",
        "a destination that is no register",
        "not emulated", // a hardware register
        "CLAMP",        // the bits in instructions that have no such modifier
        "CLAMP or OMOD",
        "a formatted load of several components to LDS",
        "SDWA of 64 bits",
        "a modifier",
        "a source that is no vector register",
        "a constant of 128 bits",
        "a join without a fork",
        "a message that is no interrupt",
    ];
    let refused = op.fidelity(arch).0 == Fidelity::Refused;
    (!refused && !illegal.contains(why)).then(|| format!("{} ({name}): {why}", site.instruction))
}

#[test]
fn no_instruction_panics_whatever_its_operands() {
    let cases: usize = std::env::var("HK_ISA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(3);
    for arch in Arch::AMD {
        let sandboxes = [Sandbox::new(arch, false), Sandbox::new(arch, true)];
        let mut generator = Generator(TestRng::from_seed(RngAlgorithm::ChaCha, &[11; 32]));
        let (mut ran, mut faults) = (0, 0);
        let mut missing: Vec<String> = vec![];
        for &op in ALL_OPS.iter().filter(|op| op.info().exists_on(arch)) {
            let two_forms = matches!(op.info().encoding, Encoding::Vop1 | Encoding::Vop2 | Encoding::Vopc);
            for case in 0..cases {
                let words = generator.instance(op, two_forms && case % 2 == 1);
                let Ok(inst) = decode(arch, &words) else { continue };
                let words = &words[..usize::from(inst.size) / 4];
                match sandboxes[case % 2].run(arch, words) {
                    Ok(()) => ran += 1,
                    Err(fault) => {
                        assert!(!fault.to_string().is_empty());
                        faults += 1;
                        missing.extend(lacks(op, arch, &fault));
                    }
                }
            }
        }
        assert!(ran > faults, "{arch}: most instances run: {ran}, {faults}");
        assert!(missing.is_empty(), "{arch}: forms that do not run:\n{}", missing.join("\n"));
    }
}

#[test]
fn modes_change_nothing_about_that() {
    // The same with register indexing and odd rounding and denormal modes.
    for arch in Arch::AMD {
        let sandbox = Sandbox::new(arch, false);
        let mut generator = Generator(TestRng::from_seed(RngAlgorithm::ChaCha, &[12; 32]));
        let vector = |op: &&Op| op.info().exists_on(arch) && op.info().name.starts_with("V_");
        for &op in ALL_OPS.iter().filter(vector) {
            let words = generator.instance(op, false);
            let Ok(inst) = decode(arch, &words) else { continue };
            // s_setreg_imm32_b32 hwreg(HW_REG_MODE), x; s_set_gpr_idx_on 3, all operands.
            let mode =
                u32::from(op.info().opcode) & 3 | (u32::from(op.info().opcode) & 0xC) << 2 | 0x0080_0200;
            let mut code = vec![0xBA00_F801, mode, 0xBF11_0F83];
            code.extend(&words[..usize::from(inst.size) / 4]);
            if let Err(fault) = sandbox.run(arch, &code) {
                assert!(!fault.to_string().is_empty());
            }
        }
    }
}
