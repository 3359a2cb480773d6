//! Buffer resources: addresses and range checks, for loads and stores of one to four words.

use crate::common::{Args, Assembly, Random, Rig, assemble, options};

/// Bytes that a case works on; no address of a lane that passes its check leaves them.
const REGION: usize = 4096;
const OLD: u32 = 0x5555_AAAA;

struct Case {
    store: bool,
    words: usize,
    offen: bool,
    idxen: bool,
    /// A lane's number is added to its index.
    add_tid: bool,
    stride: usize,
    records: usize,
    soffset: usize,
    imm: usize,
}

impl Case {
    fn random(random: &mut Random) -> Case {
        let mut pick = |n: u32| (random.next() % n) as usize;
        let stride = [0, 0, 4, 12, 16][pick(5)];
        let idxen = pick(2) == 0;
        Case {
            store: pick(2) == 0,
            words: 1 + pick(4),
            offen: pick(2) == 0,
            idxen,
            add_tid: stride != 0 && pick(4) == 0,
            stride,
            // Records are elements or bytes; borders within a lane's words come up.
            records: if idxen && stride != 0 {
                [0, 1, 17, 64, 200][pick(5)]
            } else {
                pick(300) * 4 + pick(2)
            },
            soffset: pick(8) * 4,
            imm: pick(16) * 4,
        }
    }

    fn text(&self) -> String {
        let (action, first) = if self.store { ("store", 4) } else { ("load", 12) };
        let tail = ["", "x2", "x3", "x4"][self.words - 1];
        let data = if self.words == 1 {
            format!("v{first}")
        } else {
            format!("v[{first}:{}]", first + self.words - 1)
        };
        let (address, modes) = match (self.idxen, self.offen) {
            (true, true) => ("v[8:9]", " idxen offen"),
            (true, false) => ("v8", " idxen"),
            (false, true) => ("v9", " offen"),
            (false, false) => ("off", ""),
        };
        format!(
            "s_or_b32 s37, s41, {:#x}\n  s_movk_i32 s38, {:#x}\n  s_mov_b32 s39, {:#x}\n  s_movk_i32 s29, {:#x}
  buffer_{action}_dword{tail} {data}, {address}, s[36:39], s29{modes} offset:{}",
            self.stride << 16,
            self.records,
            // The data format would be the upper bits of the stride.
            if self.add_tid { 1 << 23 } else { 0x27000 },
            self.soffset,
            self.imm
        )
    }

    /// Where word `word` of a lane is, if it is inside.
    fn place(&self, lane: usize, index: usize, voffset: usize, word: usize) -> Option<usize> {
        let index = if self.idxen { index } else { 0 } + if self.add_tid { lane } else { 0 };
        let offset = if self.offen { voffset } else { 0 } + self.imm;
        let inside = if self.add_tid && !self.idxen {
            true
        } else if self.idxen && self.stride != 0 {
            index < self.records
        } else {
            offset + self.soffset + 4 * word < self.records
        };
        inside.then_some(self.soffset + index * self.stride + offset + 4 * word)
    }
}

#[test]
fn addresses_and_range_checks() {
    let mut random = Random(99);
    let cases: Vec<Case> = (0..160).map(|_| Case::random(&mut random)).collect();
    // Data, index and offset of each lane; then for each case the region and v[12:15].
    let mut body = "  s_load_dwordx2 s[4:5], s[0:1], 0x0\n  v_lshlrev_b32 v1, 5, v0\n  v_lshlrev_b32 v2, 4, v0
  s_waitcnt lgkmcnt(0)\n  global_load_dwordx4 v[4:7], v1, s[4:5]\n  global_load_dwordx2 v[8:9], v1, s[4:5] offset:16
  s_add_u32 s30, s4, 0x800\n  s_addc_u32 s31, s5, 0\n  s_mov_b32 s42, 0xff0ffff3\n  s_mov_b32 s43, 0x7fffffff
  s_waitcnt vmcnt(0)\n"
        .to_owned();
    for case in &cases {
        (0..4).for_each(|n| body += &format!("  v_mov_b32 v{}, {OLD:#x}\n", 12 + n));
        body += &format!(
            "  s_mov_b32 s36, s30\n  s_and_b32 s41, s31, 0xffff\n  s_mov_b64 exec, s[42:43]\n  {}
  s_waitcnt vmcnt(0)\n  s_mov_b64 exec, -1\n  s_add_u32 s30, s30, {REGION:#x}\n  s_addc_u32 s31, s31, 0
  global_store_dwordx4 v2, v[12:15], s[30:31]\n  s_add_u32 s30, s30, 0x400\n  s_addc_u32 s31, s31, 0\n",
            case.text()
        );
    }
    let exec = 0x7FFF_FFFF_FF0F_FFF3u64;
    for cpu in ["gfx942", "gfx950"] {
        let rig = Rig::new(options(cpu), &assemble(&Assembly { cpu, body: &body, ..Assembly::default() }));
        let record = REGION + 1024;
        let mut data: Vec<u32> = (0..512).map(|_| random.next()).collect();
        for lane in 0..64 {
            // Every lane its own place in most cases, so that the order of stores does not matter.
            (data[8 * lane + 4], data[8 * lane + 5]) = (lane as u32, 16 * lane as u32);
        }
        data.extend((0..cases.len() * record / 4).map(|_| random.next()));
        let buffer = rig.upload("data", &data);
        rig.launch("test", 1, 64, &Args::new().push(buffer)).unwrap_or_else(|f| panic!("{f}"));
        let got: Vec<u32> = rig.download(buffer, data.len());
        let (mut passed, mut failed) = (0, 0);
        for (c, case) in cases.iter().enumerate() {
            let at = 512 + c * record / 4;
            let mut memory = data[at..at + REGION / 4].to_vec();
            for lane in 0..64 {
                let lanes = &data[8 * lane..][..8];
                let mut result = [OLD; 4];
                for word in (0..case.words).filter(|_| exec >> lane & 1 != 0) {
                    let place = case.place(lane, lanes[4] as usize, lanes[5] as usize, word);
                    *if place.is_some() { &mut passed } else { &mut failed } += 1;
                    match place {
                        Some(place) if case.store => memory[place / 4] = lanes[word],
                        Some(place) => result[word] = memory[place / 4],
                        None if !case.store => result[word] = 0,
                        None => {}
                    }
                }
                let registers = &got[at + REGION / 4 + 4 * lane..][..4];
                assert_eq!(registers, result, "{cpu}: lane {lane}: {}", case.text());
            }
            assert!(got[at..at + REGION / 4] == memory, "{cpu}: memory: {}", case.text());
        }
        assert!(passed > 5000 && failed > 5000, "{passed} words inside, {failed} outside");
    }
}
