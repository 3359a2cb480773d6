//! Attention of single tokens: what a block keeps in flight, and how little else it does.

use super::{Facts, both, ratio};
use crate::Result;
use crate::out::Table;
use hk_core::registry::{Call, CallSpec, HostCall, HostTensor, Scalar, TensorSpec};
use hk_core::{Arch, DType};
use hk_emu::Costs;

const KEYS: usize = 8192;
/// Tokens of a page.
const PAGE: usize = 16;

pub const TITLE: &str = "## A token over 8192 keys\n\n\
    `pa_decode` of one sequence with `heads` query heads of one key head, pages of 16 tokens in reverse order, one split: a block of four\n\
    waves. `bytes`: distinct bytes over those of the keys, values and queries; `loaded`: those that all loads ask for, factors of tokens\n\
    included. `in flight`: lines of 128 bytes that the loads of all resident waves of a compute unit have outstanding at most. `LDS`: bytes\n\
    moved for each key: the waves meet once, at the end; blocks of more than 16 rows have their queries there. `vector`: clocks of vector\n\
    issue over those in which memory brings the bytes, at a compute unit's share of 8.3 bytes a clock (gfx942) or 13 (gfx950). `drains`:\n\
    full drains (vmcnt(0)) of a wave between matrix instructions.";

const HEADER: [&str; 13] = [
    "columns",
    ">heads",
    "kernel",
    ">bytes",
    ">loaded",
    ">by 16",
    ">VGPRs",
    ">waves/SIMD",
    ">scratch",
    ">in flight",
    ">LDS",
    ">vector",
    ">drains",
];

pub fn table() -> Result<Table> {
    let mut table = Table::new(HEADER);
    let rows = [
        (64, ""),
        (128, ""),
        (256, ""),
        (64, "fp8"),
        (128, "fp8"),
        (256, "fp8"),
        (128, "int8"),
        (128, "fp8, factors of tokens"),
        (128, "int8, factors of tokens"),
        (128, "bf16 in pieces"),
        (128, "fp8 in pieces"),
        (128, "int8 in pieces"),
        (128, "bf16 in pieces, shuffled"),
        (128, "fp8 in pieces, shuffled"),
    ];
    let rows = rows.map(|(columns, pages)| (columns, pages, 8));
    let more = [
        (64, "", 64),
        (128, "", 32),
        (128, "", 64),
        (128, "", 128),
        (256, "", 32),
        (128, "fp8", 32),
        (128, "fp8", 64),
        (128, "fp8", 128),
        (128, "int8", 64),
        (128, "int8", 128),
        (64, "fp8, factors of tokens", 64),
        (128, "fp8, factors of tokens", 64),
        (128, "int8, factors of tokens", 64),
        (256, "fp8, factors of tokens", 32),
        (128, "bf16 in pieces", 32),
        (128, "fp8 in pieces", 32),
        (128, "int8 in pieces", 32),
    ];
    for (columns, pages, heads) in rows.into_iter().chain(more) {
        let [a, b] = Arch::AMD.map(|arch| {
            let cache = match pages {
                pages if pages.is_empty() || pages.starts_with("bf16") => DType::Bf16,
                pages if pages.starts_with("int8") => DType::I8,
                _ => DType::fp8_of(arch),
            };
            Facts::of_call(&call(cache, columns, pages, heads)?, "a token", arch)
        });
        let (a, b) = (a?.map(|f| cells(&f)), b?.map(|f| cells(&f)));
        let name =
            if pages.is_empty() { columns.to_string() } else { format!("{columns}, pages of {pages}") };
        let cells = (0..HEADER.len() - 2).map(|i| both(&a, &b, i));
        table.row([name, heads.to_string()].into_iter().chain(cells));
    }
    Ok(table)
}

fn call(cache: DType, columns: usize, what: &str, heads: usize) -> Result<HostCall> {
    let mut call: CallSpec = Call::new(crate::operator("pa_decode")?);
    let pages = KEYS / PAGE;
    call.set("q", TensorSpec::new(DType::Bf16, [1, heads, columns]))?;
    let (pieces, shuffled) = (what.contains("pieces"), what.ends_with("shuffled"));
    let piece = 16 / cache.size_bytes();
    let shapes = match (pieces, shuffled) {
        (false, _) => [vec![pages, PAGE, 1, columns], vec![pages, PAGE, 1, columns]],
        (true, false) => [vec![pages, 1, columns / piece, PAGE, piece], vec![pages, 1, columns, PAGE]],
        (true, true) => {
            [vec![pages, 1, columns / piece, PAGE, piece], vec![pages, 1, PAGE / piece, columns, piece]]
        }
    };
    for (name, shape) in ["k_cache", "v_cache"].into_iter().zip(shapes) {
        call.set(name, TensorSpec::new(cache, shape))?;
    }
    if pieces {
        call.set_scalar("layout", Scalar::Choice(if shuffled { "paged_shuffled" } else { "paged" }))?;
    }
    for name in ["k_scale", "v_scale"].into_iter().filter(|_| what.ends_with("tokens")) {
        call.set(name, TensorSpec::new(DType::F32, [pages, 1, PAGE]))?;
    }
    call.set("block_table", TensorSpec::new(DType::I32, [1, pages]))?;
    call.set("seq_lens", TensorSpec::new(DType::I32, [1]))?;
    call.set_scalar("nsplit", Scalar::Count(1))?;
    let mut call = call.sample(0)?;
    let backwards: Vec<i32> = (0..pages as i32).rev().collect();
    call.set("block_table", HostTensor::new([1, pages], &backwards)?)?;
    call.set("seq_lens", HostTensor::new([1], &[KEYS as i32])?)?;
    Ok(call)
}

fn cells(facts: &Facts) -> [String; HEADER.len() - 2] {
    let c = &facts.sum;
    let d = c.details.unwrap_or_default();
    let clocks = Costs::of(facts.arch).clocks(c);
    let moved = c.global_read_bytes + c.global_written_bytes;
    let distinct = d.distinct_read_bytes + d.distinct_written_bytes;
    let per_clock = if facts.arch == Arch::Gfx942 { 8.3 } else { 13.0 };
    let resident: u64 = facts.kernels.iter().map(|k| 4 * u64::from(k.resources.waves_per_simd)).sum();
    [
        facts.kernel_names(),
        ratio(distinct, facts.floor, 3),
        ratio(moved, facts.floor, 2),
        format!("{} %", ratio(100 * d.wide_bytes, moved, 1)),
        facts.each(|k| k.resources.vgprs + k.resources.agprs),
        facts.each(|k| k.resources.waves_per_simd),
        facts.each(|k| k.resources.scratch_bytes),
        ratio(d.lines_in_flight * resident, c.waves, 0),
        ratio(d.lds_read_bytes + d.lds_written_bytes, KEYS as u64, 1),
        format!("{:.0} %", 100.0 * clocks.vector as f64 / (distinct as f64 / per_clock)),
        ratio(d.drains, c.waves, 0),
    ]
}
