//! Buffer accesses that convert between data formats.

use std::collections::HashSet;

use hk_emu::isa::{ALL_OPS, Encoding, Op};

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use crate::semantics::convert::convert;
use crate::semantics::coverage::executed;
use crate::semantics::exact::{Exact, Format, HALF, Round, SINGLE, USUAL, Value};

/// Number, name, and widths of the components, the lowest bits first.
const DATA: [(u32, &str, &[u32]); 14] = [
    (1, "8", &[8]),
    (2, "16", &[16]),
    (3, "8_8", &[8, 8]),
    (4, "32", &[32]),
    (5, "16_16", &[16, 16]),
    (6, "10_11_11", &[11, 11, 10]),
    (7, "11_11_10", &[10, 11, 11]),
    (8, "10_10_10_2", &[2, 10, 10, 10]),
    (9, "2_10_10_10", &[10, 10, 10, 2]),
    (10, "8_8_8_8", &[8, 8, 8, 8]),
    (11, "32_32", &[32, 32]),
    (12, "16_16_16_16", &[16, 16, 16, 16]),
    (13, "32_32_32", &[32, 32, 32]),
    (14, "32_32_32_32", &[32, 32, 32, 32]),
];

const NUMBERS: [(u32, &str); 7] =
    [(0, "UNORM"), (1, "SNORM"), (2, "USCALED"), (3, "SSCALED"), (4, "UINT"), (5, "SINT"), (7, "FLOAT")];

/// Formats that mean something.
fn exists(widths: &[u32], number: u32) -> bool {
    match number {
        7 => widths.iter().all(|w| *w >= 10),
        4 | 5 => true,
        _ => widths.iter().all(|w| *w < 32),
    }
}

fn small(width: u32) -> Format {
    match width {
        16 => HALF,
        width => Format { exponent: 5, fraction: width - 5 },
    }
}

/// The register value of a component.
fn unpack(raw: u64, width: u32, number: u32) -> u32 {
    let signed = if raw >> (width - 1) != 0 { i128::from(raw) - (1 << width) } else { raw.into() };
    let float = |x: Exact| x.round(SINGLE, Round::Nearest) as u32;
    match number {
        0 => float(Exact::integer(raw.into()).over(&Exact::integer((1 << width) - 1))),
        1 => {
            let most = (1 << (width - 1)) - 1;
            float(Exact::integer(signed.max(-most)).over(&Exact::integer(most)))
        }
        2 => float(Exact::integer(raw.into())),
        3 => float(Exact::integer(signed)),
        4 => raw as u32,
        5 => signed as u32,
        _ if width == 32 => raw as u32,
        // The small ones have no sign.
        _ if width == 16 => convert(USUAL, raw, HALF, SINGLE) as u32,
        _ => convert(USUAL, raw, small(width), SINGLE) as u32,
    }
}

/// The bits of a register value that is a number.
fn pack(x: u32, width: u32, number: u32) -> u64 {
    let (mask, most) = ((1u64 << width) - 1, (1i128 << (width - 1)) - 1);
    let nearest = |low: i128, high: i128, scale: i128, round: Round| match SINGLE.value(x.into()) {
        Value::Finite(x) => x.times(&Exact::integer(scale)).rounded(round).saturated(low, high) as u64 & mask,
        Value::Infinity(negative) => (if negative { low } else { high }) as u64 & mask,
        Value::Nan => 0,
    };
    match number {
        0 => nearest(0, mask.into(), mask.into(), Round::Nearest),
        1 => nearest(-most, most, most, Round::Nearest),
        2 => nearest(0, mask.into(), 1, Round::Zero),
        3 => nearest(-most - 1, most, 1, Round::Zero),
        4 => u64::from(x).min(mask),
        5 => i128::from(x as i32).clamp(-most - 1, most) as u64 & mask,
        _ if width == 32 => x.into(),
        _ => convert(USUAL, x.into(), SINGLE, HALF),
    }
}

struct Case {
    op: Op,
    text: String,
    widths: &'static [u32],
    number: u32,
    n: usize,
    store: bool,
    half: bool,
    high: bool,
}

fn formatted(op: &Op) -> bool {
    matches!(op.info().encoding, Encoding::Mtbuf | Encoding::Mubuf) && op.info().name.contains("_FORMAT_")
}

pub fn ops() -> Vec<Op> {
    ALL_OPS.iter().copied().filter(formatted).collect()
}

fn cases(cpu: &str) -> Vec<Case> {
    let mut all = vec![];
    for op in ops().into_iter().filter(|op| executed(cpu).contains(op)) {
        let name = op.info().name;
        let n = name.rsplit('_').next().expect("components").len();
        let (store, half, high) = (name.contains("STORE"), name.contains("_D16_"), name.contains("_HI_"));
        let typed = name.starts_with("TBUFFER");
        for (data, data_name, widths) in DATA {
            for (number, number_name) in NUMBERS {
                // Stores of fewer components than there are, and of small floats by rounding, are not documented.
                let open = store && (n < widths.len() || number == 7 && widths.iter().any(|w| *w < 16));
                // Integers of more than 16 bits have no half.
                let wide = half && widths.iter().any(|w| *w > 16);
                if !exists(widths, number) || open || wide {
                    continue;
                }
                let words = if half { n.div_ceil(2) } else { n };
                let first = if store { 4 } else { 12 };
                let registers = if words == 1 {
                    format!("v{first}")
                } else {
                    format!("v[{first}:{}]", first + words - 1)
                };
                let format = format!(" format:[BUF_DATA_FORMAT_{data_name},BUF_NUM_FORMAT_{number_name}]");
                let text = format!(
                    "s_mov_b32 s39, {:#x}\n  {} {registers}, v2, s[36:39], 0{} offen",
                    if typed { 0 } else { 0xFAC | number << 12 | data << 15 },
                    op.mnemonic(),
                    if typed { &format } else { "" }
                );
                all.push(Case { op, text, widths, number, n, store, half, high });
            }
        }
    }
    all
}

#[test]
fn formats() {
    for cpu in ["gfx942", "gfx950"] {
        let cases = cases(cpu);
        assert!(cases.len() > 500);
        let mut random = Random(3);
        // Registers v[4:7], then elements of 16 bytes, then for each case the elements and v[12:15] after it.
        let mut body =
            "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_lshlrev_b32 v2, 4, v0\n  s_waitcnt lgkmcnt(0)
  global_load_dwordx4 v[4:7], v2, s[4:5]\n  global_load_dwordx4 v[20:23], v2, s[4:5] offset:1024
  s_add_u32 s36, s4, 0x800\n  s_addc_u32 s37, s5, 0\n  s_and_b32 s37, s37, 0xffff\n  s_movk_i32 s38, 0x400
  s_add_u32 s30, s4, 0x800\n  s_addc_u32 s31, s5, 0\n  s_waitcnt vmcnt(0)\n"
                .to_owned();
        for case in &cases {
            body += "  global_store_dwordx4 v2, v[20:23], s[30:31]\n";
            (0..4).for_each(|n| body += &format!("  v_mov_b32 v{}, 0x5555aaaa\n", 12 + n));
            body += &format!(
                "  s_waitcnt vmcnt(0)\n  {}\n  s_waitcnt vmcnt(0)\n  global_store_dwordx4 v2, v[12:15], s[30:31] offset:1024
  s_add_u32 s30, s30, 0x800\n  s_addc_u32 s31, s31, 0\n  s_add_u32 s36, s36, 0x800\n  s_addc_u32 s37, s37, 0\n",
                case.text
            );
        }
        let rig = Rig::new(options(cpu), &assemble(&Assembly { cpu, body: &body, ..Assembly::default() }));
        let mut data: Vec<u32> = (0..512)
            .map(|i| match random.next() % 4 {
                // Numbers about one, halves about one, small integers.
                0 if i < 256 => random.next() & 0x80FF_FFFF | 0x3F00_0000,
                1 if i < 256 => random.next() & 0x8FFF_8FFF | 0x3000_3000,
                2 if i < 256 => random.next() >> 16,
                _ => random.next(),
            })
            .collect();
        data.resize(512 + cases.len() * 512, 0);
        let buffer = rig.upload("data", &data);
        rig.launch("test", 1, 64, &Args::new().push(buffer)).unwrap_or_else(|f| panic!("{f}"));
        let got: Vec<u32> = rig.download(buffer, data.len());
        let mut distinct: std::collections::HashMap<Op, HashSet<Vec<u32>>> = Default::default();
        for (c, case) in cases.iter().enumerate() {
            let out = &got[512 + c * 512..][..512];
            distinct.entry(case.op).or_default().insert(out.to_vec());
            let integer = matches!(case.number, 4 | 5);
            for lane in 0..64 {
                let registers = &data[4 * lane..][..4];
                let mut element = data[256 + 4 * lane..][..4].to_vec();
                let mut result = [0x5555_AAAAu32; 4];
                let mut at = 0;
                let wide = |element: &[u32]| (0..4).map(|i| u128::from(element[i]) << (32 * i)).sum::<u128>();
                if case.store {
                    let mut bits = wide(&element);
                    for (i, width) in case.widths.iter().enumerate() {
                        let x = if !case.half {
                            registers[i]
                        } else {
                            let shift = if case.high || i % 2 == 1 { 16 } else { 0 };
                            let half = registers[i / 2] >> shift & 0xFFFF;
                            match case.number {
                                4 => half,
                                5 => half as u16 as i16 as u32,
                                _ => convert(USUAL, half.into(), HALF, SINGLE) as u32,
                            }
                        };
                        let field = ((1u128 << width) - 1) << at;
                        bits = bits & !field | u128::from(pack(x, *width, case.number)) << at;
                        at += width;
                    }
                    element = (0..4).map(|i| (bits >> (32 * i)) as u32).collect();
                } else {
                    let bits = wide(&element);
                    let one = if integer { 1 } else { 0x3F80_0000 };
                    for i in 0..case.n {
                        let x = match case.widths.get(i) {
                            Some(width) => {
                                let raw = (bits >> at) as u64 & ((1 << width) - 1);
                                at += width;
                                unpack(raw, *width, case.number)
                            }
                            None => {
                                if i == 3 {
                                    one
                                } else {
                                    0
                                }
                            }
                        };
                        if !case.half {
                            result[i] = x;
                            continue;
                        }
                        let half =
                            if integer { x & 0xFFFF } else { convert(USUAL, x.into(), SINGLE, HALF) as u32 };
                        let high = case.high || i % 2 == 1;
                        let word = &mut result[i / 2];
                        *word = if high { *word & 0xFFFF | half << 16 } else { *word & 0xFFFF_0000 | half };
                    }
                }
                let place = format!("{cpu}: {}, lane {lane}, registers {registers:08x?}", case.text);
                assert_eq!(out[4 * lane..][..4], element, "{place}: element");
                assert_eq!(
                    out[256 + 4 * lane..][..4],
                    result,
                    "{place}: of {:08x?}",
                    &data[256 + 4 * lane..][..4]
                );
            }
        }
        for (op, seen) in distinct {
            assert!(seen.len() > 8, "{}: only {} different results", op.mnemonic(), seen.len());
        }
    }
}
