//! Instructions that move data between lanes, or between lanes and scalar registers: whole waves at a time.

use std::collections::HashSet;

use hk_emu::isa::Op;

use crate::common::{Args, Assembly, Random, Rig, assemble, options};
use crate::semantics::coverage::executed;

type Register = [u32; 64];

/// A wave before an instruction: EXEC, v4 to v7, v12 to v14, s[22:23], and 1024 bytes of LDS.
#[derive(Clone)]
struct Wave {
    exec: u64,
    a: Register,
    b: Register,
    /// A byte offset in LDS, aligned to 16.
    place: Register,
    d: [Register; 3],
    scalar: [u32; 2],
    lds: Vec<u8>,
}

impl Wave {
    fn active(&self, lane: usize) -> bool {
        self.exec >> lane & 1 != 0
    }
    /// v12 of the active lanes from the lanes that a rule names, where those are active.
    fn gather(mut self, from: impl Fn(usize, &Wave) -> usize) -> Wave {
        let before = self.clone();
        for lane in (0..64).filter(|l| before.active(*l)) {
            let source = from(lane, &before);
            self.d[0][lane] = if before.active(source) { before.a[source] } else { 0 };
        }
        self
    }
    /// Elements of `bits` bits of what each lane's address names, each row of 16 lanes as a matrix: `place` gives
    /// the lane and the element that element `n` of a lane comes from.
    fn transposed(mut self, bits: usize, n: usize, place: fn(usize, usize) -> (usize, usize)) -> Wave {
        let before = self.clone();
        for lane in (0..64).filter(|l| before.active(*l)) {
            let mut out = 0u128;
            for element in 0..n {
                let (column, from) = place(lane % 16, element);
                let row = lane / 16 * 16 + column;
                if !before.active(row) {
                    continue;
                }
                let at = before.place[row] as usize;
                let bytes = before.lds[at..at + 12].iter().rev().fold(0u128, |x, b| x << 8 | u128::from(*b));
                out |= (bytes >> (bits * from) & ((1 << bits) - 1)) << (bits * element);
            }
            for (i, d) in self.d.iter_mut().enumerate().take(bits * n / 32) {
                d[lane] = (out >> (32 * i)) as u32;
            }
        }
        self
    }
    fn splat(mut self, x: u32) -> Wave {
        self.d[0] = [x; 64];
        self
    }
    fn swapped(mut self, group: usize) -> Wave {
        for lane in (0..64).filter(|l| l / group % 2 == 0) {
            // Odd groups of the destination and even ones of the source; each write obeys EXEC.
            let (x, y) = (self.d[0][lane + group], self.d[1][lane]);
            if self.active(lane) {
                self.d[1][lane] = x;
            }
            if self.active(lane + group) {
                self.d[0][lane + group] = y;
            }
        }
        self
    }
}

struct Case {
    op: Op,
    text: String,
    model: Box<dyn Fn(Wave) -> Wave>,
}

/// The manual's rules of `ds_swizzle_b32`.
fn swizzle(i: usize, offset: usize) -> usize {
    let low = offset & 31;
    let half = i & 32;
    if offset >= 0xE000 {
        let reversed = (0..5).fold(0, |r, bit| r | (i >> bit & 1) << (4 - bit));
        return reversed >> low.count_ones() | i & low | half;
    }
    if offset >= 0xC000 {
        let n = (offset >> 5 & 31) as i64 * if offset & 0x400 != 0 { -1 } else { 1 };
        let rotated = (i as i64 + n).rem_euclid(32) as usize;
        return i & low & 31 | rotated & !low & 31 | half;
    }
    if offset & 0x8000 != 0 {
        return i / 4 * 4 + (offset >> (2 * (i % 4)) & 3);
    }
    ((i & low & 31 | offset >> 5 & 31) ^ offset >> 10 & 31) | half
}

fn cases() -> Vec<Case> {
    let mut all = vec![];
    let mut add = |op: Op, text: String, model: Box<dyn Fn(Wave) -> Wave>| all.push(Case { op, text, model });
    // Lane numbers count modulo 64; EXEC does not matter.
    for lane in [0usize, 5, 37, 63] {
        let text = format!("v_readlane_b32 s26, v4, {lane}\ns_mov_b64 exec, -1\nv_mov_b32 v12, s26");
        add(
            Op::V_READLANE_B32,
            text,
            Box::new(move |w| {
                let x = w.a[lane];
                w.splat(x)
            }),
        );
        let text = format!("v_writelane_b32 v12, s22, {lane}");
        add(
            Op::V_WRITELANE_B32,
            text,
            Box::new(move |mut w| {
                w.d[0][lane] = w.scalar[0];
                w
            }),
        );
    }
    add(
        Op::V_READLANE_B32,
        "v_readlane_b32 s26, v4, s23\ns_mov_b64 exec, -1\nv_mov_b32 v12, s26".to_owned(),
        Box::new(|w| {
            let x = w.a[w.scalar[1] as usize % 64];
            w.splat(x)
        }),
    );
    add(
        Op::V_WRITELANE_B32,
        "s_mov_b32 m0, s23\nv_writelane_b32 v12, s22, m0".to_owned(),
        Box::new(|mut w| {
            w.d[0][w.scalar[1] as usize % 64] = w.scalar[0];
            w
        }),
    );
    add(
        Op::V_READFIRSTLANE_B32,
        "v_readfirstlane_b32 s26, v4\ns_mov_b64 exec, -1\nv_mov_b32 v12, s26".to_owned(),
        Box::new(|w| {
            let x = w.a[(0..64).find(|l| w.active(*l)).unwrap_or(0)];
            w.splat(x)
        }),
    );
    add(Op::V_PERMLANE16_SWAP_B32, "v_permlane16_swap_b32 v12, v13".to_owned(), Box::new(|w| w.swapped(16)));
    add(Op::V_PERMLANE32_SWAP_B32, "v_permlane32_swap_b32 v12, v13".to_owned(), Box::new(|w| w.swapped(32)));
    for offset in [0usize, 4, 36, 255] {
        let suffix = if offset == 0 { String::new() } else { format!(" offset:{offset}") };
        add(
            Op::DS_BPERMUTE_B32,
            format!("ds_bpermute_b32 v12, v5, v4{suffix}"),
            Box::new(move |w| w.gather(|lane, w| (w.b[lane] as usize + offset) / 4 % 64)),
        );
        add(
            Op::DS_PERMUTE_B32,
            format!("ds_permute_b32 v12, v5, v4{suffix}"),
            Box::new(move |mut w| {
                // The highest lane that sends to a lane wins.
                let before = w.clone();
                let target = |from: usize| (before.b[from] as usize + offset) / 4 % 64;
                for to in (0..64).filter(|l| before.active(*l)) {
                    let sends = |from: &usize| before.active(*from) && target(*from) == to;
                    w.d[0][to] = (0..64).rev().find(sends).map_or(0, |from| before.a[from]);
                }
                w
            }),
        );
    }
    let mut patterns = vec![0x8000usize, 0x801B, 0x80E4, 0x80FF, 0x8055, 0x80B1];
    patterns.extend([0, 0x1F, 0x7C1F, 0x041F, 0x401F, 0x0018, 0x03F0, 0x5555, 0x2AAA, 0x7FFF]);
    patterns.extend([0xC000, 0xC020, 0xC3E0, 0xC420, 0xC538, 0xC07C, 0xC7E3, 0xDFFF]);
    patterns.extend([0xE000, 0xE010, 0xE018, 0xE01C, 0xE01E, 0xE01F]);
    for offset in patterns {
        add(
            Op::DS_SWIZZLE_B32,
            format!("ds_swizzle_b32 v12, v4 offset:{offset:#x}"),
            Box::new(move |w| w.gather(|lane, _| swizzle(lane, offset))),
        );
    }
    // Half n of a lane is half lane % 4 of the lane a quarter of 16 further on, and so for bytes and nibbles.
    add(
        Op::DS_READ_B64_TR_B16,
        "ds_read_b64_tr_b16 v[12:13], v6".to_owned(),
        Box::new(|w| w.transposed(16, 4, |lane, n| (lane / 4 + 4 * n, lane % 4))),
    );
    add(
        Op::DS_READ_B64_TR_B8,
        "ds_read_b64_tr_b8 v[12:13], v6".to_owned(),
        Box::new(|w| w.transposed(8, 8, |lane, n| (lane / 8 + 2 * n, lane % 8))),
    );
    add(
        Op::DS_READ_B64_TR_B4,
        "ds_read_b64_tr_b4 v[12:13], v6".to_owned(),
        Box::new(|w| w.transposed(4, 16, |lane, n| (n, lane))),
    );
    add(
        Op::DS_READ_B96_TR_B6,
        "ds_read_b96_tr_b6 v[12:14], v6".to_owned(),
        Box::new(|w| w.transposed(6, 16, |lane, n| (n, lane))),
    );
    // Nothing happens.
    for op in [Op::V_NOP, Op::V_CLREXCP, Op::DS_NOP, Op::BUFFER_WBL2, Op::BUFFER_INV] {
        let scope = if op.mnemonic().starts_with("buffer") { " sc1" } else { "" };
        add(op, op.mnemonic() + scope, Box::new(|w| w));
    }
    all
}

pub fn ops() -> Vec<Op> {
    cases().into_iter().map(|c| c.op).collect()
}

const WORDS: usize = 16 + 64 * 16;

fn check(cpu: &str) {
    let cases: Vec<Case> = cases().into_iter().filter(|c| executed(cpu).contains(&c.op)).collect();
    let mut random = Random(77);
    let waves: Vec<Wave> = (0..24)
        .map(|i| {
            let mut register = |mask: u32| -> Register { std::array::from_fn(|_| random.next() & mask) };
            let (a, b) = (register(!0), register(if i % 2 == 0 { 0xFC } else { !0 }));
            let d = [register(!0), register(!0), register(!0)];
            Wave {
                exec: match i % 6 {
                    0..=2 => !0,
                    3 => u64::from(random.next()) << 32 | u64::from(random.next()),
                    4 => [1 << 63, 0x0000_FFFF_0000_FFFF, 0x5555_5555_5555_5555][i / 6 % 3],
                    _ => 0,
                },
                place: std::array::from_fn(|l| (l as u32 * 29 + i as u32) % 64 * 16),
                lds: (0..1024).map(|_| random.next() as u8).collect(),
                scalar: [random.next(), random.next()],
                a,
                b,
                d,
            }
        })
        .collect();
    let inputs = waves.len() * WORDS * 4;
    let mut body = format!(
        "  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_mul_i32 s6, s2, {record}
  s_waitcnt lgkmcnt(0)
  s_add_u32 s8, s4, s6
  s_addc_u32 s9, s5, 0
  s_load_dwordx4 s[20:23], s[8:9], 0x0
  v_lshlrev_b32 v1, 6, v0
  global_load_dwordx4 v[4:7], v1, s[8:9] offset:64
  global_load_dwordx4 v[40:43], v1, s[8:9] offset:80
  global_load_dwordx4 v[20:23], v1, s[8:9] offset:96
  v_lshlrev_b32 v2, 4, v0
  s_mul_i32 s6, s2, {results}
  v_add_u32 v3, s6, v2
  v_add_u32 v3, {inputs:#x}, v3
  s_waitcnt vmcnt(0) lgkmcnt(0)
  ds_write_b128 v2, v[20:23]\n",
        record = WORDS * 4,
        results = cases.len() * 1024,
    );
    for case in &cases {
        body += "  v_mov_b32 v12, v40\n  v_mov_b32 v13, v41\n  v_mov_b32 v14, v42\n  v_mov_b32 v15, 0\n  s_mov_b64 exec, s[20:21]\n";
        for line in case.text.lines() {
            body += &format!("  {line}\n");
        }
        body += "  s_waitcnt lgkmcnt(0)\n  s_mov_b64 exec, -1\n  global_store_dwordx4 v3, v[12:15], s[4:5]\n  v_add_u32 v3, 0x400, v3\n";
    }
    let image = assemble(&Assembly { cpu, body: &body, lds: 1024, ..Assembly::default() });
    let rig = Rig::new(options(cpu), &image);
    let mut data = vec![];
    for w in &waves {
        data.extend([w.exec as u32, (w.exec >> 32) as u32, w.scalar[0], w.scalar[1]]);
        data.extend([0; 12]);
        for l in 0..64 {
            data.extend([w.a[l], w.b[l], w.place[l], 0, w.d[0][l], w.d[1][l], w.d[2][l], 0]);
            data.extend(
                w.lds[16 * l..][..16].chunks(4).map(|b| u32::from_le_bytes(b.try_into().expect("four"))),
            );
            data.extend([0; 4]);
        }
    }
    assert_eq!(data.len() * 4, inputs);
    data.resize(data.len() + waves.len() * cases.len() * 256, 0);
    let buffer = rig.upload("data", &data);
    rig.launch("test", waves.len() as u32, 64, &Args::new().push(buffer)).unwrap_or_else(|f| panic!("{f}"));
    let got: Vec<u32> = rig.download(buffer, data.len());
    for (c, case) in cases.iter().enumerate() {
        let mut distinct = HashSet::new();
        for (w, wave) in waves.iter().enumerate() {
            let want = (case.model)(wave.clone());
            let out = &got[inputs / 4 + (w * cases.len() + c) * 256..][..256];
            for lane in 0..64 {
                let r: [u32; 3] = std::array::from_fn(|i| out[4 * lane + i]);
                let d = [0, 1, 2].map(|i| want.d[i][lane]);
                assert_eq!(
                    r, d,
                    "{cpu}: {}: lane {lane}, EXEC {:#x}, {:x?}",
                    case.text, wave.exec, wave.scalar
                );
                distinct.insert(r);
            }
        }
        assert!(distinct.len() > 10, "{}: only {} different results", case.text, distinct.len());
    }
}

#[test]
fn moves_between_lanes() {
    check("gfx942");
    check("gfx950");
}
