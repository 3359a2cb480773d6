//! The opcode table `src/isa/table.rs` is what LLVM says: every opcode of every encoding is probed and the
//! table rebuilt. `HK_BLESS=1 cargo test -p hk-emu --test tests isa::table` rewrites it.

use crate::isa::llvm;
use std::fmt::Write;

/// Register numbers of the probes, one per role, far enough apart for 32-register operands.
const DST: u32 = 20;
const SRC: [u32; 3] = [60, 100, 140];

/// Every way to fill the operand fields of one opcode, fullest first: the first that LLVM accepts shows them all.
struct Probe {
    encoding: &'static str,
    opcode: u32,
    candidates: Vec<Vec<u32>>,
}

fn combinations(fields: &[u32]) -> Vec<u32> {
    let mut all: Vec<u32> = (0..1 << fields.len()).collect();
    all.sort_by_key(|m: &u32| std::cmp::Reverse(m.count_ones()));
    all.iter()
        .map(|m| {
            fields.iter().enumerate().filter(|(i, _)| m >> i & 1 == 1).map(|(_, f)| f).fold(0, |a, f| a | f)
        })
        .collect()
}

fn probes() -> Vec<Probe> {
    let mut probes = vec![];
    let mut add = |encoding, opcode, candidates| probes.push(Probe { encoding, opcode, candidates });
    let [a, b, c] = SRC;
    for op in 0..0x60 {
        add("Sop2", op, vec![vec![0x8000_0000 | op << 23 | DST << 16 | 96 << 8 | a]]);
    }
    for op in 0..0x1d {
        let word = 0xB000_0000 | op << 23;
        let hwreg = 0x1A04;
        add(
            "Sopk",
            op,
            vec![
                vec![word | DST << 16 | hwreg],
                vec![word | DST << 16 | hwreg, 0x1122_3344],
                vec![word | hwreg],
            ],
        );
    }
    for op in 0..256 {
        let word = 0xBE80_0000 | op << 8;
        add("Sop1", op, combinations(&[DST << 16, a]).into_iter().map(|f| vec![word | f]).collect());
    }
    for op in 0..128 {
        add("Sopc", op, vec![vec![0xBF00_0000 | op << 16 | 96 << 8 | a]]);
        add("Sopp", op, vec![vec![0xBF80_0000 | op << 16 | 3], vec![0xBF80_0000 | op << 16]]);
    }
    for op in 0..256 {
        let word = 0xC000_0000 | op << 18;
        let mut candidates = vec![];
        for imm in [Some(0x40), None] {
            for fields in combinations(&[DST << 6, a / 2]) {
                candidates.push(vec![word | fields | u32::from(imm.is_some()) << 17, imm.unwrap_or(0)]);
            }
        }
        add("Smem", op, candidates);
    }
    for op in 0..62 {
        let word = op << 25 | DST << 17 | b << 9 | (256 + a);
        add("Vop2", op, vec![vec![word], vec![word, 0x1122_3344]]);
    }
    for op in 0..256 {
        let word = 0x7E00_0000 | op << 9;
        add("Vop1", op, vec![vec![word | DST << 17 | (256 + a)], vec![word]]);
        add("Vopc", op, vec![vec![0x7C00_0000 | op << 17 | b << 9 | (256 + a)]]);
    }
    // Numbers below 0x1C0 are promoted VOPC, VOP2 and VOP1 instructions: `decode` derives them.
    for op in 0x1C0..0x380 {
        let first = 0xD000_0000 | op << 16 | DST;
        let sources = |base: u32, n: usize| {
            SRC[..n]
                .iter()
                .enumerate()
                .fold(0, |w, (i, s)| w | ((base + if base == 0 { 96 } else { *s }) << (9 * i)))
        };
        let mixed = (256 + a) | 96 << 9 | 96 << 18;
        add(
            "Vop3",
            op,
            vec![
                vec![first, sources(256, 3)],
                vec![first, sources(256, 2)],
                vec![first, mixed],
                vec![first, (256 + a) | 96 << 9],
                vec![first, a | 96 << 9],
                vec![first, sources(256, 1)],
                vec![first, 0],
            ],
        );
    }
    for op in 0..128 {
        let first = 0xD380_0000 | op << 16 | DST;
        let all = (256 + a) | (256 + b) << 9 | (256 + c) << 18;
        let without_third = (256 + a) | (256 + b) << 9;
        add(
            "Vop3p",
            op,
            vec![
                vec![first, all],
                vec![first | 1 << 14, all | 3 << 27],
                vec![first, without_third],
                vec![first, 256 + a],
            ],
        );
    }
    for op in 0..256 {
        for gds in [0, 1 << 16] {
            let word = 0xD800_0000 | op << 17 | gds;
            let fields = combinations(&[a, b << 8, c << 16, DST << 24]);
            let candidates = fields.into_iter().map(|f| vec![word, f]).collect();
            add("Ds", op, candidates);
        }
    }
    for (segment, encoding) in ["Flat", "Scratch", "Global"].into_iter().enumerate() {
        for op in 0..128 {
            let word = 0xDC00_0000 | op << 18 | (segment as u32) << 14;
            let base = if encoding == "Flat" { 0 } else { 0x7F << 16 };
            let fields = combinations(&[a, b << 8, DST << 24]);
            let mut candidates: Vec<_> = fields
                .iter()
                .map(|f| vec![word | if encoding == "Scratch" { 1 << 13 } else { 0 }, f | base])
                .collect();
            candidates.extend(fields.iter().map(|f| vec![word, *f]));
            add(encoding, op, candidates);
        }
    }
    for op in 0..128 {
        let mut candidates = vec![];
        for first in [1 << 12, 1 << 12 | 1 << 16, 0] {
            for fields in combinations(&[a, DST << 8, 9 << 16 | 4 << 24]) {
                candidates.push(vec![0xE000_0000 | op << 18 | first, fields]);
            }
        }
        add("Mubuf", op, candidates);
    }
    for op in 0..16 {
        add(
            "Mtbuf",
            op,
            vec![vec![
                0xE800_0000 | op << 15 | 1 << 12 | 7 << 23 | 14 << 19,
                4 << 24 | 9 << 16 | DST << 8 | a,
            ]],
        );
    }
    probes
}

/// Widths in registers of destination and sources, read off LLVM's text by the probes' register numbers.
fn widths(text: &str) -> [u32; 4] {
    let mut widths = [0; 4];
    for token in text.split([' ', ',']).filter(|t| t.starts_with(['v', 's', 'a'])) {
        let digits = &token[1..];
        let (first, width) = match digits.strip_prefix('[').and_then(|r| r.split(']').next()?.split_once(':'))
        {
            Some((lo, hi)) => match (lo.parse::<u32>(), hi.parse::<u32>()) {
                (Ok(lo), Ok(hi)) => (lo, hi - lo + 1),
                _ => continue,
            },
            None => match digits.parse() {
                Ok(n) => (n, 1),
                Err(_) => continue,
            },
        };
        let role = match first {
            DST => 0,
            60 => 1,
            96 | 100 => 2,
            140 => 3,
            _ => continue,
        };
        widths[role] = widths[role].max(width);
    }
    widths
}

/// One row before its modifiers are known.
struct Row {
    encoding: &'static str,
    opcode: u32,
    name: String,
    targets: &'static str,
    widths: [u32; 4],
}

fn rows() -> Vec<Row> {
    let probes = probes();
    let all: Vec<Vec<u32>> = probes.iter().flat_map(|p| p.candidates.clone()).collect();
    let texts = ["gfx942", "gfx950"].map(|cpu| llvm::disassemble(cpu, &all));
    let mut rows: Vec<Row> = vec![];
    let mut at = 0;
    for probe in &probes {
        let range = at..at + probe.candidates.len();
        at = range.end;
        let found = [0, 1].map(|t: usize| {
            range.clone().find_map(|i| texts[t][i].as_ref()).map(|text| {
                let mnemonic = text.split_whitespace().next().expect("a mnemonic");
                let name = mnemonic.trim_end_matches("_e32").trim_end_matches("_e64").to_uppercase();
                (name, widths(text))
            })
        });
        let targets = match found {
            [None, None] => continue,
            [Some(_), None] => "GFX942",
            [None, Some(_)] => "GFX950",
            [Some(ref a), Some(ref b)] if a == b => "BOTH",
            [Some(_), Some(_)] => {
                panic!("{} {}: the targets differ: {found:?}", probe.encoding, probe.opcode)
            }
        };
        let (name, widths) = found.into_iter().flatten().next().expect("one target has it");
        if rows.iter().any(|r| r.name == name) {
            assert_eq!(probe.encoding, "Ds", "{name} has two opcodes"); // with and without gds
            continue;
        }
        rows.push(Row { encoding: probe.encoding, opcode: probe.opcode, name, targets, widths });
    }
    rows
}

/// The vector ALU's modifier probes of one row: words in the VOP3 or VOP3P encoding, and natively with a literal.
fn modifier_probes(row: &Row) -> Vec<Vec<u32>> {
    let opcode = match row.encoding {
        "Vopc" | "Vop3" | "Vop3p" => row.opcode,
        "Vop2" => row.opcode + 0x100,
        _ => row.opcode + 0x140,
    };
    let packed = row.encoding == "Vop3p";
    let first = if packed { 0xD380_0000 | 1 << 14 } else { 0xD000_0000 } | opcode << 16 | DST;
    let mut second = if packed { 3 << 27 } else { 0 };
    for (i, source) in SRC.into_iter().enumerate() {
        if row.widths[i + 1] != 0 {
            second |= (256 + source) << (9 * i);
        }
    }
    // Scalar third operands: the mask of cndmask and the carry-ins.
    if ["V_CNDMASK_B32", "V_ADDC_CO_U32", "V_SUBB_CO_U32", "V_SUBBREV_CO_U32"].contains(&row.name.as_str()) {
        second |= 106 << 18;
    }
    if row.name == "V_READLANE_B32" {
        second = (256 + SRC[0]) | 96 << 9;
    }
    let mut probes = vec![];
    for bit in 0..4 {
        probes.push(vec![first | 1 << (11 + bit), second]);
    }
    for source in 0..3 {
        probes.push(vec![first, second | 1 << (29 + source)]);
    }
    for source in 0..3 {
        let with_one = second & !(511 << (9 * source)) | 242 << (9 * source); // 1.0
        probes.push(vec![first, with_one]);
    }
    for literal in [0x1234_5678, 0x13, 0xC000_0000] {
        probes.push(match row.encoding {
            "Vop1" => vec![0x7E00_0000 | DST << 17 | row.opcode << 9 | 255, literal],
            "Vop2" => vec![row.opcode << 25 | DST << 17 | SRC[1] << 9 | 255, literal],
            "Vopc" => vec![0x7C00_0000 | row.opcode << 17 | SRC[1] << 9 | 255, literal],
            _ => vec![0xFFFF_FFFF],
        });
    }
    probes
}

/// Kinds of the sources, printed order of `op_sel`, sources that take `neg`, from the texts of `modifier_probes`.
fn modifiers(row: &Row, texts: &[Option<String>]) -> (String, String, u32) {
    let text = |i: usize| texts[i].as_deref().unwrap_or("");
    let mut op_sel: Vec<u8> = vec![];
    for bit in 0..4u8 {
        let Some(list) = text(usize::from(bit)).split("op_sel:[").nth(1) else { continue };
        let entries: Vec<&str> = list.split(']').next().expect("closed").split(',').collect();
        op_sel.resize(entries.len(), b'-');
        if let Some(at) = entries.iter().position(|e| *e == "1") {
            op_sel[at] = b'0' + bit;
        }
    }
    let negated = |i: usize| text(4 + i).contains(if row.encoding == "Vop3p" { "neg_lo" } else { " -v" });
    // A mixed-precision fma negates sources although it is VOP3P.
    let neg = (0..3).filter(|&i| negated(i) || text(4 + i).contains(" -v")).map(|i| 1 << i).sum();
    let mut kinds = String::new();
    for source in 0..3 {
        if row.widths[source + 1] == 0 {
            break;
        }
        let literal = text(10);
        let kind = match text(7 + source) {
            t if t.contains("0x3c00") => 's',
            t if t.contains("0x3f800000") => 'i',
            // Only native forms take a literal, and only as the first source.
            _ if source == 0 && literal.contains("0x5678") => 'h',
            _ if source == 0 && row.widths[1] == 2 && text(11).contains(" 0x13") => 'd',
            _ if row.name == "V_CVT_F32_BF16" => 'b',
            _ if row.name == "V_FMAMK_F32" => 'w', // its inner literal looks like a packed one
            _ if source == 0
                && row.widths[1] == 1
                && text(12).ends_with(&format!(" 0xc0000000, v{}", SRC[1])) =>
            {
                'p'
            }
            _ => 'w',
        };
        kinds.push(kind);
    }
    (kinds, String::from_utf8(op_sel).expect("digits"), neg)
}

fn table() -> String {
    let rows = rows();
    let is_valu = |row: &&Row| row.encoding.starts_with("Vop");
    let probes: Vec<_> = rows.iter().filter(is_valu).flat_map(modifier_probes).collect();
    let [gfx942, gfx950] = ["gfx942", "gfx950"].map(|cpu| llvm::disassemble(cpu, &probes));
    let mut at = 0;
    let mut out = String::from(HEADER);
    for row in &rows {
        let (kinds, op_sel, neg) = if is_valu(&row) {
            let texts = if row.targets == "GFX950" { &gfx950 } else { &gfx942 };
            let n = modifier_probes(row).len();
            at += n;
            modifiers(row, &texts[at - n..at])
        } else {
            Default::default()
        };
        let Row { encoding, opcode, name, targets, widths } = row;
        writeln!(out, "    {encoding} {opcode} {name} {targets} {widths:?} {kinds:?} {op_sel:?} {neg};")
            .unwrap();
    }
    out + "}\n"
}

const HEADER: &str = "\
// Every compute opcode of gfx942 and gfx950, as LLVM disassembles it. Rebuilt and compared by `tests/isa/table.rs`.
//
// Row: encoding, opcode, name, targets, widths in registers of destination, src0, src1, src2 as the fields of the
// encoding hold them (0: the field is unused, an immediate, or fixed by the opcode); and of vector ALU rows: the kind
// of each source (how constants read: w 32 bits, h 16-bit float, b bf16, s 16-bit integer, p packed, i 32-bit pattern, d f64), the
// op_sel bits in printed order, and the mask of sources that take neg and abs.

isa_table! {
";

#[test]
fn table_is_what_llvm_disassembles() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/isa/table.rs");
    let want = table();
    if std::env::var_os("HK_BLESS").is_some() {
        std::fs::write(path, &want).expect("write the table");
    }
    let have = std::fs::read_to_string(path).expect("src/isa/table.rs");
    for (n, (h, w)) in have.lines().zip(want.lines()).enumerate() {
        assert_eq!(h, w, "src/isa/table.rs:{}", n + 1);
    }
    assert_eq!(have.len(), want.len());
}
