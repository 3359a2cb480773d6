//! Splits of a token's keys: merged by the last block, or in a second launch.

use crate::Result;
use crate::out::Table;
use hk_attention::{
    AttentionOutputs, DecodeWorkspace, KvLayout, LatentKeys, MlaDecodeInputs, MlaDecodeOutputs, MlaOptions,
    PaDecodeInputs, PaDecodeOptions, PagedKv, Pages, QueryTile, Splits, Tickets, mla_decode_rope, pa_decode,
};
use hk_core::{Arch, Device, Profile, Stream, bf16};

/// Query heads of the one key head.
const GROUP: usize = 8;
const COLUMNS: usize = 128;
const PAGE: usize = 16;
const KEYS: usize = 16_384;
/// Heads of latent rows, and their columns of values and beside them.
const LATENT: [usize; 3] = [16, 512, 64];

pub const TITLE: &str = "## Merges of splits\n\n\
    `pa_decode` of one sequence of 16384 keys in pages of 16, 8 query heads of one key head, d = 128, bf16, both targets. `merge`: what the merge\n\
    adds to a launch that leaves partial results: thousands of instructions, KiB read. `one`: by the last block that arrives, which\n\
    includes the tickets of all blocks; `two`: by a second launch. The bits are the same.";

pub const LATENT_TITLE: &str = "## Merges of splits of latent rows\n\n\
    The same of `mla_decode_rope`: one query of 16 heads over 16384 rows, 576 and 512 columns, bf16.";

pub fn table() -> Result<Table> {
    count(run)
}

pub fn latent_table() -> Result<Table> {
    count(run_latent)
}

/// Counts a call with so many splits, in one launch or two.
fn count(call: impl Fn(&Stream, usize, bool) -> Result<Vec<Profile>>) -> Result<Table> {
    let mut table = Table::new([
        "target",
        ">splits",
        ">one: instructions",
        ">KiB",
        ">two: instructions",
        ">KiB",
        ">blocks",
    ]);
    for arch in Arch::AMD {
        let stream = Device::open(&format!("emu:{arch}?details=true"))?.create_stream()?;
        for splits in [32, 64, 128] {
            let (one, two) = (call(&stream, splits, true)?, call(&stream, splits, false)?);
            let instructions = |of: &[Profile]| of.iter().map(|p| p.counters.instructions).sum::<u64>();
            let read = |of: &[Profile]| of.iter().map(|p| p.counters.global_read_bytes).sum::<u64>();
            // The first launch of two leaves partial results, and nothing else.
            let first = &two[..1];
            let row = |of: &[Profile]| {
                [
                    format!("{:.1}", (instructions(of) - instructions(first)) as f64 / 1e3),
                    ((read(of) - read(first)) / 1024).to_string(),
                ]
            };
            let blocks = two[1..].iter().map(|p| p.counters.workgroups).sum::<u64>();
            let cells = [[arch.to_string(), splits.to_string()], row(&one), row(&two)].into_iter().flatten();
            table.row(cells.chain([blocks.to_string()]));
        }
    }
    Ok(table)
}

fn run(stream: &Stream, splits: usize, one_launch: bool) -> Result<Vec<Profile>> {
    let pages = KEYS / PAGE;
    let shape = [pages, PAGE, 1, COLUMNS];
    let q = stream.alloc_zeroed::<bf16>(GROUP * COLUMNS)?;
    let [k, v] = [(); 2].map(|()| stream.alloc_zeroed::<bf16>(pages * PAGE * COLUMNS));
    let (k, v) = (k?, v?);
    let table = stream.upload(&(0..pages as i32).collect::<Vec<_>>())?;
    let lens = stream.upload(&[KEYS as i32])?;
    let mut out = stream.alloc_zeroed::<bf16>(GROUP * COLUMNS)?;
    let len = splits * GROUP * (COLUMNS + 2);
    let mut partials = stream.alloc_zeroed::<f32>(len)?;
    let mut tickets = Tickets::new(stream)?;
    stream.take_profiles()?;
    let pages = Pages { block_table: table.view([1, pages])?, layout: KvLayout::Nhd };
    let cache = PagedKv { k_cache: k.view(shape)?, v_cache: v.view(shape)?, pages };
    let inputs =
        PaDecodeInputs::<bf16, bf16> { q: q.view([1, GROUP, COLUMNS])?, cache, seq_lens: lens.view([1])? };
    let outputs = AttentionOutputs { out: out.view_mut([1, GROUP, COLUMNS])?, lse: None };
    let partials = Some(partials.view_mut([len])?);
    let workspace = DecodeWorkspace { partials, tickets: one_launch.then_some(&mut tickets) };
    let options = PaDecodeOptions { splits: Splits::Count(splits), ..PaDecodeOptions::default() };
    pa_decode(stream, inputs, outputs, workspace, &options)?;
    Ok(stream.take_profiles()?)
}

fn run_latent(stream: &Stream, splits: usize, one_launch: bool) -> Result<Vec<Profile>> {
    let [heads, c, pe] = LATENT;
    let (shape, q_shape, out_shape) = ([KEYS, 1, 1, c + pe], [1, heads, c + pe], [1, heads, c]);
    let [q, pool] = [q_shape.iter().product(), KEYS * (c + pe)].map(|len| stream.alloc_zeroed::<bf16>(len));
    let (q, pool) = (q?, pool?);
    let [starts, slots] = [vec![0, KEYS as i32], (0..KEYS as i32).collect()].map(|v| stream.upload(&v));
    let (starts, slots) = (starts?, slots?);
    let mut out = stream.alloc_zeroed::<bf16>(heads * c)?;
    let len = splits * heads * (c + 2);
    let mut partials = stream.alloc_zeroed::<f32>(len)?;
    let mut tickets = Tickets::new(stream)?;
    stream.take_profiles()?;
    let inputs = MlaDecodeInputs::<bf16, bf16> {
        q: q.view(q_shape)?,
        kv_pool: pool.view(shape)?,
        kv_scale: None,
        keys: LatentKeys::Slots { kv_indptr: starts.view([2])?, kv_indices: slots.view([KEYS])? },
        cu_seqlens_q: None,
        rope: None,
    };
    let outputs = MlaDecodeOutputs { out: out.view_mut(out_shape)?, lse: None, k_pe_out: None };
    let partials = Some(partials.view_mut([len])?);
    let workspace = DecodeWorkspace { partials, tickets: one_launch.then_some(&mut tickets) };
    let splits = Splits::Count(splits);
    let options = MlaOptions { tile: Some(QueryTile::Short), splits, ..MlaOptions::default() };
    mla_decode_rope(stream, inputs, outputs, workspace, &options)?;
    Ok(stream.take_profiles()?)
}
