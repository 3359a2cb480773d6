//! Scalar loads, stores and atomics.

use hk_emu::isa::{ALL_OPS, Encoding, Op};

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use crate::semantics::coverage::executed;
use crate::semantics::memory::modify;

/// Bytes that one case works on.
const REGION: usize = 256;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Load,
    Store,
    /// The operation, and whether the old value comes back.
    Atomic(&'static str, bool),
}

struct Case {
    kind: Kind,
    words: usize,
    /// Byte offset in the region; what a resource holds of it.
    at: usize,
    inside: usize,
    text: String,
}

/// What an instruction does and to how many words, from its name.
fn parse(op: Op) -> Option<(Kind, usize, bool)> {
    let name = op.info().name;
    let rest = ["S_BUFFER_", "S_SCRATCH_", "S_"].iter().find_map(|p| name.strip_prefix(p))?;
    let (rest, words) = match rest.rsplit_once('X') {
        Some((rest, n)) if n.parse::<usize>().is_ok() => (rest.trim_end_matches('_'), n.parse().ok()?),
        _ => (rest, 1),
    };
    let kind = match rest {
        "LOAD_DWORD" => Kind::Load,
        "STORE_DWORD" => Kind::Store,
        _ => {
            let what = rest.strip_prefix("ATOMIC_")?.to_lowercase();
            let known = [
                "swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc",
                "dec",
            ];
            Kind::Atomic(known.iter().find(|k| **k == what)?, false)
        }
    };
    Some((kind, words, name.starts_with("S_SCRATCH_")))
}

/// Data and results are s[40:55]; the region's address s[8:9], its resource s[12:15].
fn cases(cpu: &str, random: &mut Random) -> Vec<Case> {
    let mut all = vec![];
    for op in ALL_OPS.iter().copied().filter(|op| op.info().encoding == Encoding::Smem) {
        let Some((kind, words, scratch)) = parse(op).filter(|_| executed(cpu).contains(&op)) else {
            continue;
        };
        let buffer = op.info().name.starts_with("S_BUFFER_");
        for i in 0..6 {
            let (kind, bytes) = match kind {
                Kind::Atomic(what, _) => (Kind::Atomic(what, i % 2 == 0), 4 * words),
                other => (other, 4 * words),
            };
            let at = random.next() as usize % ((REGION - 64) / bytes) * bytes;
            // A resource that ends before the access, in it, or behind it.
            let inside = if buffer && i >= 3 { [0, 4, bytes][i - 3].min(bytes) } else { bytes };
            let inside = if matches!(kind, Kind::Atomic(..)) && inside < bytes { 0 } else { inside };
            let data = match kind {
                Kind::Atomic("cmpswap", _) => 2 * words,
                _ => words,
            };
            let last = 40 + data - 1;
            let data = if last == 40 { "s40".to_owned() } else { format!("s[40:{last}]") };
            let base = if buffer { "s[12:15]" } else { "s[8:9]" };
            // Offsets: an immediate, a register, both.
            let (offset, set) = match i % 3 {
                0 => (format!("{:#x}", if scratch { at / 4 * 4 } else { at }), String::new()),
                1 => ("s30".to_owned(), format!("s_movk_i32 s30, {at:#x}\n")),
                _ => (
                    format!("s30 offset:{:#x}", at / 2 / 4 * 4),
                    format!("s_movk_i32 s30, {:#x}\n", at - at / 2 / 4 * 4),
                ),
            };
            let limit = if buffer { format!("s_movk_i32 s14, {:#x}\n", at + inside) } else { String::new() };
            let glc = if matches!(kind, Kind::Atomic(_, true)) { " glc" } else { "" };
            let text = format!("{set}{limit}{} {data}, {base}, {offset}{glc}", op.mnemonic());
            // The register offset of the scratch forms counts dwords.
            if scratch && i % 3 != 0 {
                continue;
            }
            all.push(Case { kind, words, at, inside, text });
        }
    }
    all
}

pub fn ops() -> Vec<Op> {
    ALL_OPS
        .iter()
        .copied()
        .filter(|op| op.info().encoding == Encoding::Smem && parse(*op).is_some())
        .collect()
}

#[test]
fn loads_stores_and_atomics() {
    for cpu in ["gfx942", "gfx950"] {
        let mut random = Random(5);
        let cases = cases(cpu, &mut random);
        assert!(cases.len() > 200);
        // For each case 16 words of data, the region, 16 words of results.
        let record = 64 + REGION + 64;
        let mut body = "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_mov_b32 v1, 0\n  s_waitcnt lgkmcnt(0)
  s_mov_b32 s15, 0x27000\n  s_mov_b64 exec, 1\n"
            .to_owned();
        for case in &cases {
            body += "  s_load_dwordx16 s[40:55], s[4:5], 0x0\n  s_add_u32 s8, s4, 64\n  s_addc_u32 s9, s5, 0
  s_mov_b32 s12, s8\n  s_and_b32 s13, s9, 0xffff\n  s_waitcnt lgkmcnt(0)\n";
            for line in case.text.lines() {
                body += &format!("  {line}\n");
            }
            body += "  s_waitcnt lgkmcnt(0)\n";
            for i in (0..16).step_by(4) {
                (0..4).for_each(|n| body += &format!("  v_mov_b32 v{}, s{}\n", 4 + n, 40 + i + n));
                body +=
                    &format!("  global_store_dwordx4 v1, v[4:7], s[4:5] offset:{}\n", 64 + REGION + 4 * i);
            }
            body += &format!("  s_add_u32 s4, s4, {record}\n  s_addc_u32 s5, s5, 0\n");
        }
        let rig = Rig::new(options(cpu), &assemble(&Assembly { cpu, body: &body, ..Assembly::default() }));
        // Small numbers and equal ones among random words.
        let mut data: Vec<u32> = (0..cases.len() * record / 4)
            .map(|_| if random.next().is_multiple_of(3) { random.next() % 4 } else { random.next() })
            .collect();
        for (c, case) in cases.iter().enumerate() {
            if c % 2 == 0 {
                // Some comparands are equal to what is there.
                let (at, from) = (c * record / 4, 16 + case.at / 4);
                (0..case.words).for_each(|i| data[at + case.words + i] = data[at + from + i]);
            }
        }
        let buffer = rig.upload("data", &data);
        rig.launch("test", 1, 64, &Args::new().push(buffer)).unwrap_or_else(|f| panic!("{f}"));
        let got: Vec<u32> = rig.download(buffer, data.len());
        let words = REGION / 4;
        for (c, case) in cases.iter().enumerate() {
            let (before, after) =
                (&data[c * record / 4..][..record / 4], &got[c * record / 4..][..record / 4]);
            let mut registers = before[..16].to_vec();
            let mut memory = before[16..16 + words].to_vec();
            let (at, inside) = (case.at / 4, case.inside / 4);
            let wide = |x: &[u32], i: usize| match case.words {
                1 => u64::from(x[i]),
                _ => u64::from(x[i]) | u64::from(x[i + 1]) << 32,
            };
            let put = |x: &mut [u32], i: usize, value: u64| {
                (0..case.words).for_each(|n| x[i + n] = (value >> (32 * n)) as u32);
            };
            match case.kind {
                Kind::Load => {
                    (0..case.words).for_each(|i| registers[i] = if i < inside { memory[at + i] } else { 0 });
                }
                Kind::Store => (0..inside).for_each(|i| memory[at + i] = registers[i]),
                Kind::Atomic(what, returns) => {
                    let old = if inside == 0 { 0 } else { wide(&memory, at) };
                    let new = modify(
                        what,
                        32 * case.words as u32,
                        old,
                        wide(&registers, 0),
                        wide(&registers, case.words),
                        None,
                    );
                    if inside != 0 {
                        put(&mut memory, at, new);
                    }
                    if returns {
                        put(&mut registers, 0, old);
                    }
                }
            }
            let text = &case.text;
            assert_eq!(after[16 + words..], registers, "{cpu}: {text}: registers");
            assert_eq!(after[16..16 + words], memory, "{cpu}: {text}: memory");
        }
    }
}
