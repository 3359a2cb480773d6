//! Arguments of AITER's kernels, by the folder and the name of a code object: what the host code passes, as in
//! `crates/hk-emu/validation`, with operands of zeros.

use std::collections::HashMap;

use hk_emu::Machine;
use serde_json::Value;

use crate::model::Buffer;
use crate::rows::Row;

/// Kernels read ahead of what they need.
const SLACK: u64 = 1 << 18;

/// Arguments in slots, and the buffers among them.
pub struct Arguments<'a> {
    machine: &'a Machine,
    /// Of the whole segment.
    pub bytes: Vec<u8>,
    slot: usize,
    /// In the order of their allocation.
    pub buffers: Vec<Buffer>,
}

/// What a row says of its launch besides the columns that all rows have.
struct Shape<'a> {
    row: &'a Row,
    params: HashMap<String, String>,
    /// The name of the code object, without its ending.
    name: String,
    grid: [u32; 3],
}

impl Shape<'_> {
    fn text(&self, name: &str) -> &str {
        self.params.get(name).map_or("", String::as_str)
    }

    /// A parameter that may be missing, and is then 0.
    fn int(&self, name: &str) -> u32 {
        self.text(name).parse().unwrap_or(0)
    }

    /// The first of these that `params` or a column has.
    fn first(&self, names: &[&str]) -> Option<u32> {
        let known = |name: &&str| -> Option<u32> {
            let text = self.params.get(*name).map_or_else(|| self.row.get(name), String::as_str);
            text.parse::<f64>().ok().filter(|n| *n >= 1.0).map(|n| n as u32)
        };
        names.iter().find_map(known)
    }

    /// The same, or why the row cannot be modelled.
    fn needed(&self, names: &[&str]) -> Result<u32, String> {
        self.first(names).ok_or_else(|| format!("params: {} is needed", names[0]))
    }

    /// Whether the name has one of these words between its underscores.
    fn has(&self, words: &[&str]) -> bool {
        self.name.split('_').any(|part| words.iter().any(|word| part.eq_ignore_ascii_case(word)))
    }

    /// The number behind a word of the name: `hd128`, `qlen2`.
    fn named(&self, word: &str) -> Option<u32> {
        self.name.split('_').find_map(|part| part.strip_prefix(word)?.parse().ok())
    }

    /// The two sizes of the last word such as `32x256`.
    fn tile(&self) -> Option<[u32; 2]> {
        self.name.rsplit('_').find_map(|part| {
            let (rows, columns) = part.split_once('x')?;
            Some([rows.parse().ok()?, columns.parse().ok()?])
        })
    }

    fn on_gfx950(&self) -> bool {
        self.row.get("co_path").contains("gfx950")
    }
}

/// Fills `args` for the kernel of a row.
///
/// # Errors
/// What is missing, or that the family is not known.
pub fn fill(row: &Row, grid: [u32; 3], args: &mut Arguments<'_>) -> Result<(), String> {
    let params: HashMap<String, Value> = match row.get("params") {
        "" => HashMap::new(),
        text => serde_json::from_str(text).map_err(|e| format!("params: {e}"))?,
    };
    let plain = |v: Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let params = params.into_iter().map(|(name, value)| (name, plain(value))).collect();
    let path = row.get("co_path").to_owned();
    let file = path.rsplit('/').next().unwrap_or("");
    let name = file.strip_suffix(".co").unwrap_or(file).to_owned();
    let shape = Shape { row, params, name, grid };
    let folder = |folder: &str| path.contains(&format!("/{folder}/"));
    if folder("bf16gemm") {
        args.gemm_bf16(&shape)
    } else if folder("i8gemm") {
        args.gemm_i8(&shape)
    } else if folder("fp8gemm_blockscale") {
        args.gemm_fp8(&shape)
    } else if file.starts_with("flatmm_") {
        args.flat(&shape)
    } else if folder("f4gemm") {
        args.gemm_fp4(&shape)
    } else if folder("fmoe_2stages") {
        args.first_of_two(&shape)
    } else if file.starts_with("fmoe_") {
        args.fused(&shape)
    } else if folder("fmha_v3_fwd") {
        args.attention(&shape)
    } else if folder("fmha_v3_bwd") {
        args.backward(&shape)
    } else if folder("pa") || file.starts_with("pa_") {
        args.paged(&shape)
    } else if folder("mla") {
        args.latent(&shape)
    } else {
        Err(format!("not modelled: the arguments of family {}, {path}, are not known", row.get("family")))
    }
}

/// What rows call the queries, and the keys, of a sequence of attention.
const QUERIES: [&str; 10] = ["seqlen_q", "sq", "s_q", "q_len", "seqlen", "seq_len", "seq", "s", "M", "N"];
const KEYS: [&str; 6] = ["seqlen_k", "seqlen_kv", "sk", "s_k", "kv_len", "k_len"];

/// And the heads of keys, and the sequences.
const KEY_HEADS: [&str; 9] =
    ["nhead_k", "nheads_k", "nhead_kv", "nheads_kv", "num_kv_heads", "num_heads_k", "hk", "hkv", "h_k"];
const SEQUENCES: [&str; 5] = ["batch", "batch_size", "nbatch", "b", "bs"];

/// Heads of queries and of keys, and sequences; those of the grid where `params` does not say.
fn heads(shape: &Shape<'_>, grid_heads: u32, grid_batch: u32) -> Result<(u32, u32, u32), String> {
    let queries =
        ["nhead_q", "nheads_q", "num_heads_q", "num_q_heads", "hq", "nheads", "nhead", "num_heads", "h"];
    let hq = shape.first(&queries).unwrap_or(grid_heads);
    let hk = shape.first(&KEY_HEADS).unwrap_or(hq);
    if !hq.is_multiple_of(hk) {
        return Err(format!("params: {hq} heads of queries, {hk} of keys"));
    }
    let b = shape.first(&SEQUENCES).unwrap_or(grid_batch);
    Ok((hq, hk, b))
}

/// Items of a work list: its sequence, the first row of its partial sums or -1, rows of queries, keys in units of the list, the
/// keys behind them, and heads.
type Item = [u32; 8];

/// The work list of a persistent decode: equal shares of all keys for each workgroup, cut where a sequence ends, and for each
/// workgroup the first of its items. A sequence of `units` keys, or pages of them, that one workgroup does not have alone gives
/// partial sums. Third, their rows.
fn work_list(
    workgroups: u32,
    sequences: u32,
    units: u32,
    queries: u32,
    heads: &[u32],
    behind: impl Fn(u32) -> u32,
) -> (Vec<u32>, Vec<u32>, u32) {
    let all = u64::from(sequences) * u64::from(units) * heads.len() as u64;
    let (mut first, mut items, mut partial) = (vec![0], vec![], 0);
    for workgroup in 0..u64::from(workgroups) {
        let share = |w: u64| w * all / u64::from(workgroups);
        let (mut at, end) = (share(workgroup), share(workgroup + 1));
        while at < end {
            let (row, begin) = (at / u64::from(units), (at % u64::from(units)) as u32);
            let n = (end - at).min(u64::from(units - begin)) as u32;
            let sequence = row as u32 % sequences;
            let sums = if n == units { u32::MAX } else { partial };
            partial += if n == units { 0 } else { queries };
            let (own, keys) = (sequence * queries, sequence * units + begin);
            let item: Item = [
                sequence,
                sums,
                own,
                own + queries,
                keys,
                keys + n,
                behind(units - begin - n),
                heads[row as usize / sequences as usize],
            ];
            items.extend(item);
            at += u64::from(n);
        }
        first.push((items.len() / 8) as u32);
    }
    (first, items, partial)
}

fn sizes(row: &Row) -> Result<[u32; 3], String> {
    let [m, n, k] = ["M", "N", "K"].map(|column| row.number::<u32>(column));
    Ok([m?, n?, k?])
}

/// Tokens that go to experts, in blocks of one expert each.
struct Route {
    tokens: u32,
    experts: u32,
    topk: u32,
    block: u32,
    /// Blocks that the list has room for; `None`: as many as there are.
    blocks: Option<u32>,
}

impl Route {
    /// Sorted ids, the expert of each block, and ids with their padding. Every token goes to experts at random, as in the
    /// benchmark, from one seed.
    fn sorted(&self) -> (Vec<u32>, Vec<u32>, u32) {
        let mut of_expert: Vec<Vec<u32>> = vec![vec![]; self.experts as usize];
        for (i, expert) in self.chosen().into_iter().enumerate() {
            let (token, place) = (i as u32 / self.topk, i as u32 % self.topk);
            of_expert[expert as usize].push(token | place << 24);
        }
        let pad = self.tokens | self.topk << 24;
        let (mut ids, mut of_block) = (vec![], vec![]);
        for (expert, tokens) in of_expert.iter().enumerate() {
            ids.extend_from_slice(tokens);
            ids.resize(ids.len().next_multiple_of(self.block as usize), pad);
            of_block.resize(ids.len() / self.block as usize, expert as u32);
        }
        let valid = ids.len() as u32;
        if let Some(blocks) = self.blocks {
            let blocks = (blocks as usize).max(of_block.len());
            ids.resize(blocks * self.block as usize, pad);
            of_block.resize(blocks, 0);
        }
        (ids, of_block, valid)
    }

    /// The experts of each token.
    fn chosen(&self) -> Vec<u32> {
        let mut state = 1u64;
        let mut random = |n: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (((state >> 33) * u64::from(n)) >> 31) as u32
        };
        let mut order: Vec<u32> = (0..self.experts).collect();
        let mut chosen = vec![];
        for _ in 0..self.tokens {
            for place in 0..self.topk {
                let other = place + random(self.experts - place);
                order.swap(place as usize, other as usize);
                chosen.push(order[place as usize]);
            }
        }
        chosen
    }

    fn of(shape: &Shape<'_>, block: u32, blocks: Option<u32>) -> Result<(Route, [u32; 2]), String> {
        let needed = |name: &str| shape.needed(&[name]);
        let route = Route {
            tokens: needed("token")?,
            experts: needed("expert")?,
            topk: needed("topk")?,
            block,
            blocks,
        };
        if route.topk > route.experts {
            return Err(format!("params: topk {} of {} experts", route.topk, route.experts));
        }
        Ok((route, [needed("model_dim")?, needed("inter_dim")?]))
    }
}

impl<'a> Arguments<'a> {
    /// None yet.
    pub fn new(machine: &'a Machine) -> Arguments<'a> {
        Arguments { machine, bytes: vec![], slot: 16, buffers: vec![] }
    }

    fn push(&mut self, bytes: &[u8]) {
        let end = self.bytes.len() + self.slot;
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(end.max(self.bytes.len()), 0);
    }

    fn int(&mut self, value: u32) {
        self.push(&value.to_le_bytes());
    }

    fn ints(&mut self, values: &[u32]) {
        values.iter().for_each(|value| self.int(*value));
    }

    fn float(&mut self, value: f32) {
        self.push(&value.to_le_bytes());
    }

    /// A pointer to nothing.
    fn null(&mut self) {
        self.push(&[0; 8]);
    }

    fn buffer(&mut self, bytes: u64, label: &str) -> Result<(), String> {
        let base = self.machine.alloc_zeroed(bytes.max(4), 4096, label).map_err(|e| e.to_string())?;
        self.buffers.push(Buffer { base, bytes: bytes.max(4) });
        self.push(&base.to_le_bytes());
        Ok(())
    }

    /// A buffer that holds words.
    fn words(&mut self, words: &[u32], label: &str) -> Result<(), String> {
        self.buffer(4 * words.len() as u64, label)?;
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let base = self.buffers.last().map_or(0, |b| b.base);
        self.machine.write(base, &bytes).map_err(|e| e.to_string())
    }

    fn gemm_bf16(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let [m, n, k] = sizes(shape.row)?;
        let (m64, n64, k64) = (u64::from(m), u64::from(n), u64::from(k));
        let half = !shape.text("outdtype").contains("float32");
        let out = if half { 2 } else { 4 };
        let biased = shape.text("bias").eq_ignore_ascii_case("true");
        self.buffer(m64 * n64 * out, "d")?;
        self.int(0);
        self.buffer(m64 * k64 * 2, "a")?;
        self.buffer(n64 * k64 * 2, "b")?;
        self.float(1.0);
        self.float(0.0);
        let row = n * out as u32;
        let split = shape.grid[2];
        self.ints(&[row, 0, row, 0, 2 * k, 0, 2 * k, 0, m, n, k, split, u32::from(half)]);
        if biased {
            self.buffer(n64 * 2, "bias")?;
        } else {
            self.null();
        }
        self.int(u32::from(biased));
        self.buffer(4 * 16 * 64, "semaphore")
    }

    fn gemm_i8(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let [m, n, k] = sizes(shape.row)?;
        let (m64, n64, k64) = (u64::from(m), u64::from(n), u64::from(k));
        self.buffer(m64 * n64 * 2, "c")?;
        self.buffer(m64 * k64, "a")?;
        self.buffer(n64 * k64, "b")?;
        self.buffer(m64 * 4, "a_scale")?;
        self.buffer(n64 * 4, "b_scale")?;
        self.buffer(n64 * 4, "bias")?;
        self.ints(&[m, n, k, k, k, 2 * n, shape.int("splitK").max(1)]);
        Ok(())
    }

    fn gemm_fp8(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let [m, n, k] = sizes(shape.row)?;
        let (m64, n64, k64) = (u64::from(m), u64::from(n), u64::from(k));
        self.buffer(m64 * n64 * 2, "c")?;
        self.buffer(m64 * k64, "a")?;
        self.buffer(n64 * k64, "b")?;
        self.buffer(m64 * k64.div_ceil(128) * 4, "a_scale")?;
        self.buffer(n64.div_ceil(128) * k64.div_ceil(128) * 4, "b_scale")?;
        self.buffer(n64 * 4, "bias")?;
        let slices = shape.int("splitK").max(1);
        self.ints(&[m, n, k, k, k, 2 * n, slices, m, n.div_ceil(128), k.div_ceil(128)]);
        Ok(())
    }

    /// fp8 with block scales, pointers and integers without padding.
    fn flat(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let [m, n, k] = sizes(shape.row)?;
        let (m64, n64, k64) = (u64::from(m), u64::from(n), u64::from(k));
        self.slot = 8;
        self.buffer(m64 * k64, "a")?;
        self.buffer(n64 * k64, "b")?;
        self.null();
        self.buffer(m64 * k64.div_ceil(128) * 4, "a_scale")?;
        self.buffer(n64.div_ceil(128) * k64.div_ceil(128) * 4, "b_scale")?;
        self.null();
        self.buffer(m64 * n64 * 2, "d")?;
        (0..4).for_each(|_| self.null());
        self.slot = 4;
        self.ints(&[k, n, m, 0, 0, 0]);
        Ok(())
    }

    fn gemm_fp4(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let [m, n, k] = sizes(shape.row)?;
        let (m64, n64, k64) = (u64::from(m), u64::from(n), u64::from(k));
        let padded = |rows: u64| rows.next_multiple_of(256);
        let scales = k64.div_ceil(32).next_multiple_of(8);
        self.buffer(padded(m64) * n64 * 2, "d")?;
        self.int(0);
        self.buffer(m64 * k64 / 2, "a")?;
        self.buffer(n64 * k64 / 2, "b")?;
        self.float(1.0);
        self.float(0.0);
        self.ints(&[0, 0, n, 0, k, 0, k, 0, m, n, k]);
        self.buffer(padded(m64) * scales, "a_scale")?;
        self.buffer(padded(n64) * scales, "b_scale")?;
        self.ints(&[scales as u32, 0, scales as u32, 0, shape.int("log2_k_split")]);
        Ok(())
    }

    /// A fused MoE kernel: the formats and the tile are in its name.
    fn fused(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let has = |words: &[&str]| shape.has(words);
        let name = &shape.name;
        let tile = shape.tile();
        let sub = name.split("subGU_").nth(1).and_then(|s| s.split('_').next()?.parse().ok());
        let [block, columns] = tile.unwrap_or([32, sub.unwrap_or(512)]);
        let quantized = !(name.contains("noquant") || matches!(&**name, "fmoe_b16" | "fmoe_f16"));
        let fp4 = has(&["pertokenMXfp4", "mxfp4"]);
        let gates = if has(&["g1u0"]) || !quantized { 1 } else { 2 };
        let (flat, persistent) = (has(&["flat", "emsort"]), has(&["ps", "psx", "emsort"]));
        let smf = has(&["smf"]);
        let blocks_of = name.contains("blockscale").then_some(128).or(fp4.then_some(32));
        let smooth = smf || has(&["multix", "int4fp8"]) || name.contains("int8_g1u0");
        let wide = smf || has(&["a16"]) || name.contains("blockscaleBf16") || fp4 && flat || !quantized;
        let [gx, gy, _] = shape.grid;
        let swapped = smf || name.contains("_a16") && tile.is_none();
        let rows = if swapped { gx } else { gy };
        let blocks = (!persistent && !flat).then_some(rows);
        let block = shape.first(&["block_m"]).filter(|_| tile.is_none()).unwrap_or(block);
        let (route, [dim, inter]) = Route::of(shape, block, blocks)?;
        let (ids, of_block, valid) = route.sorted();
        let (d, i) = (u64::from(dim), u64::from(inter));
        let (e, t) = (u64::from(route.experts), u64::from(route.tokens));
        // Half bytes of a value of x and of the weights.
        let x_nibbles = if wide {
            4
        } else if fp4 {
            1
        } else {
            2
        };
        let w_nibbles = if !quantized {
            4
        } else if fp4 || has(&["int4fp8"]) {
            1
        } else {
            2
        };
        let of_w = |n: u64| (n * w_nibbles / 2) as u32;
        // Bytes of the scales of an expert's weights.
        let scales = |rows: u64, k: u64| -> u64 {
            match blocks_of {
                Some(128) => rows.div_ceil(128) * k.div_ceil(128) * 4,
                Some(_) => rows.next_multiple_of(256) * k.div_ceil(32).next_multiple_of(8),
                None if quantized => rows * 4,
                None => 0,
            }
        };
        let x_scale = match blocks_of {
            Some(128) => t * d.div_ceil(128) * 4,
            Some(_) => (ids.len() as u64).next_multiple_of(256) * d.div_ceil(32).next_multiple_of(8),
            None if smf => e * d * 4,
            None => t * u64::from(route.topk) * 4,
        };
        let places = if has(&["multix", "int4fp8"]) || smooth && !smf { u64::from(route.topk) } else { 1 };
        self.buffer(t * (d + if flat { 4 } else { 0 }) * 2, "o")?;
        self.buffer(places * t * d * x_nibbles / 2 + SLACK, "x")?;
        self.buffer(e * gates * i * d * w_nibbles / 2 + SLACK, "w1")?;
        self.words(&[valid, route.tokens], "valid ids")?;
        self.buffer(e * i * d * w_nibbles / 2 + SLACK, "w2")?;
        let scaled = quantized && (!wide || smf);
        self.optional(if scaled { x_scale + SLACK } else { 0 }, "x_scale")?;
        self.optional(if quantized { e * scales(gates * i, d) + SLACK } else { 0 }, "w1_scale")?;
        self.optional(if quantized { e * scales(d, i) + SLACK } else { 0 }, "w2_scale")?;
        self.optional(if smooth { e * i * 4 } else { 0 }, "smooth")?;
        if flat {
            self.words(&route.chosen(), "experts of tokens")?;
        } else {
            self.words(&ids, "sorted ids")?;
        }
        self.buffer(4 * ids.len() as u64 + SLACK, "sorted weights")?;
        self.words(&of_block, "experts of blocks")?;
        let x_row = (d * x_nibbles / 2) as u32;
        self.ints(&[dim, inter, route.tokens, route.experts, x_row, of_w(d), of_w(i), 2 * dim]);
        self.ints(&[
            of_w(gates * i * d),
            of_w(i * d),
            scales(gates * i, d) as u32,
            scales(d, i) as u32,
            4 * inter,
            route.topk,
        ]);
        let slices = inter.div_ceil(columns);
        let workgroups = if persistent { gx } else { 0 };
        self.ints(&[workgroups / slices * slices, slices]);
        Ok(())
    }

    fn optional(&mut self, bytes: u64, label: &str) -> Result<(), String> {
        if bytes == 0 {
            self.null();
            return Ok(());
        }
        self.buffer(bytes, label)
    }

    /// The first GEMM of a MoE layer of two launches.
    fn first_of_two(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let [_, gy, gz] = shape.grid;
        let tile = shape.tile().unwrap_or([shape.first(&["block_m"]).unwrap_or(32), 0]);
        let block = shape.first(&["block_m"]).unwrap_or(tile[0]);
        let (route, [dim, inter]) = Route::of(shape, block, Some(gy))?;
        let (ids, of_block, valid) = route.sorted();
        let (d, i) = (u64::from(dim), u64::from(inter));
        let (e, t, topk) = (u64::from(route.experts), u64::from(route.tokens), u64::from(route.topk));
        let blockscale = shape.name.contains("blockscale");
        let fp4 = shape.name.contains("MXfp4");
        let nibbles = if fp4 {
            1
        } else if shape.name.contains("noquant") {
            4
        } else {
            2
        };
        let scales = if blockscale {
            (2 * i).div_ceil(128) * d.div_ceil(128) * 4
        } else if fp4 {
            2 * i * d.div_ceil(32)
        } else {
            2 * i * 4
        };
        let out = if gz > 1 {
            8
        } else if blockscale {
            1
        } else {
            2
        };
        self.buffer(t * topk * i * out + t * topk * i.div_ceil(128) * 4 + SLACK, "h")?;
        self.buffer(t * d * nibbles / 2 + SLACK, "x")?;
        self.buffer(e * 2 * i * d * nibbles / 2 + SLACK, "w")?;
        self.words(&[valid, route.tokens], "valid ids")?;
        self.buffer(t * d.div_ceil(if fp4 { 32 } else { 128 }) * 4 + SLACK, "x_scale")?;
        self.buffer(e * scales + SLACK, "w_scale")?;
        self.null();
        self.words(&ids, "sorted ids")?;
        self.words(&of_block, "experts of blocks")?;
        let row = (d * nibbles / 2) as u32;
        self.ints(&[dim, inter, route.tokens, route.experts, row, row, (topk * i * out) as u32]);
        self.ints(&[2 * inter * row, scales as u32, 4 * inter, route.topk, gz.trailing_zeros()]);
        let act = shape.text("act").to_ascii_lowercase();
        self.int(u32::from(act.contains("gelu")));
        if shape.name.contains("doweight") {
            self.buffer(4 * ids.len() as u64 + SLACK, "sorted weights")?;
        } else {
            self.null();
        }
        Ok(())
    }

    /// Flash attention forward. Sizes that `params` lacks come from the grid and the name.
    fn attention(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let name = shape.name.to_ascii_lowercase();
        let (masked, group) = (name.contains("_causal"), name.ends_with("_group"));
        let dim = |word: &str| shape.named(word);
        let d = dim("hd").or(if name.contains("hd192") { Some(192) } else { None });
        let d = shape.first(&["hdim_q", "hdim", "head_dim", "d_qk", "dqk", "d"]).or(d).unwrap_or(128);
        let wide_v = if d == 192 { 128 } else { d };
        let dv = shape.first(&["hdim_v", "head_dim_v", "d_v", "dv"]).unwrap_or(wide_v);
        let wide = !shape.on_gfx950() && d == 192;
        let [gx, gy, gz] = shape.grid;
        let (tiles, grid_heads, grid_batch) = match (group, wide) {
            (true, _) => (gz, gx, gy),
            (false, true) => (gy, gx, gz),
            (false, false) => (gx, gy, gz),
        };
        let tile = if d == 192 { 128 } else { 256 };
        let pairs = if masked && !wide { 2 } else { 1 };
        let (hq, hk, b) = heads(shape, grid_heads, grid_batch)?;
        // Whatever a row calls the length, the grid has its tiles.
        let fits = |s: &u32| s.div_ceil(tile).div_ceil(pairs) == tiles;
        let sq = QUERIES.iter().filter_map(|name| shape.first(&[name])).find(fits);
        let sq = sq.unwrap_or(tiles * tile * pairs);
        let sk = shape.first(&KEYS).unwrap_or(sq);
        let size: u64 = if name.contains("fp8") { 1 } else { 2 };
        let rows = |s: u32| u64::from(b) * u64::from(s);
        let (q_row, k_row, v_row) = (hq * d, hk * d, hk * dv);
        self.buffer(rows(sq) * u64::from(hq * dv) * 2, "o")?;
        self.buffer(rows(sq) * u64::from(q_row) * size + SLACK, "q")?;
        self.buffer(rows(sk) * u64::from(k_row) * size + SLACK, "k")?;
        self.buffer(rows(sk) * u64::from(v_row) * size + SLACK, "v")?;
        self.buffer(rows(sq) * u64::from(hq) * 4, "lse")?;
        self.float((d as f32).powf(-0.5));
        let bytes = size as u32;
        // Packed sequences: rows of all of them, and no stride between them.
        let total = |s: u32| if group { b * s } else { s };
        let strides = |row: u32, columns: u32, s: u32, bytes: u32| {
            [row * bytes, columns * bytes, if group { 0 } else { s.wrapping_mul(row * bytes) }]
        };
        let q = strides(q_row, d, sq, bytes);
        self.ints(&[total(sq), q[0], tile * q_row * bytes, q[1], q[2], hq / hk]);
        self.ints(&strides(k_row, d, sk, bytes));
        let option = if wide {
            0
        } else if masked && (!hq.is_multiple_of(8) || sq > 16384) {
            3
        } else {
            5
        };
        let lse = u32::from(matches!(shape.text("lse"), "1" | "true" | "True"));
        self.ints(&[option, lse, total(sk), d, dv, hq]);
        self.ints(&strides(v_row, dv, sk, bytes));
        self.ints(&strides(hq * dv, dv, sq, 2));
        if group {
            let starts = |s: u32| (0..=b).map(|i| i * s).collect::<Vec<_>>();
            self.words(&starts(sq), "first queries")?;
            self.words(&starts(sk), "first keys")?;
        } else {
            self.null();
            self.null();
        }
        self.int(4 * total(sq));
        if group {
            let starts = |s: u32| (0..=b).map(|i| i * s).collect::<Vec<_>>();
            self.words(&starts(sq), "first padded queries")?;
            self.words(&starts(sk), "first padded keys")?;
        } else {
            self.null();
            self.null();
        }
        if size == 1 {
            let each = u64::from(b * hk) * 4;
            for label in ["q_scale", "k_scale", "v_scale"] {
                self.buffer(each, label)?;
            }
            let strides = if shape.on_gfx950() { [0, 0] } else { [4 * hk, 4] };
            (0..3).for_each(|_| self.ints(&strides));
        }
        Ok(())
    }

    /// One launch of flash attention backward: sums of o do, dq with dk and dv, or the conversion of dq.
    fn backward(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let name = shape.name.to_ascii_lowercase();
        let has = |part: &str| name.contains(part);
        let (group, wide_sums, gfx950) = (name.ends_with("_group"), has("_a32"), shape.on_gfx950());
        let d_tile = shape.named("hd").ok_or("co_path: no head size in the name")?;
        let dv_tile = if has("hd192_128") { 128 } else { d_tile };
        let d = shape.first(&["hdim_q", "hdim", "head_dim", "d_qk", "dqk", "d"]).unwrap_or(d_tile);
        let dv = shape.first(&["hdim_v", "head_dim_v", "d_v", "dv"]).unwrap_or(d.min(dv_tile));
        let [gx, gy, gz] = shape.grid;
        let (hq, hk, b) = heads(shape, gy, gz)?;
        let (sums_of_o, conversion) = (has("_odo_"), has("_dq_convert") || has("_dq_shuffle"));
        let windowed = has("_swa");
        let tile = match (d_tile, dv_tile) {
            _ if sums_of_o => 128,
            _ if conversion => 64,
            (192, 192) => 64,
            (128, _) if gfx950 && !windowed => 256,
            _ => 192,
        };
        let main = !(sums_of_o || conversion);
        // Both ends of the triangle make one workgroup.
        let pairs = if main && has("_causal") { 2 } else { 1 };
        let fits = |n: &u32| n.div_ceil(tile).div_ceil(pairs) == gx;
        let length = |names: &[&str]| names.iter().filter_map(|name| shape.first(&[name])).find(fits);
        let from_grid = gx * tile * pairs;
        let (sq, sk) = if main {
            let sk = length(&KEYS).or(length(&QUERIES)).unwrap_or(from_grid);
            (shape.first(&["seqlen_q", "sq", "s_q", "q_len"]).unwrap_or(sk), sk)
        } else {
            let sq = length(&QUERIES).unwrap_or(from_grid);
            (sq, shape.first(&KEYS).unwrap_or(sq))
        };
        let rows = |n: u32| u64::from(b) * u64::from(n);
        let total = |n: u32| if group { b * n } else { n };
        // Bytes from head to head, sequence to sequence and row to row.
        let strides = |heads: u32, d: u32, n: u32| {
            let row = heads * d * 2;
            [2 * d, if group { 0 } else { n.wrapping_mul(row) }, row]
        };
        let by_head = [4 * total(sq), if group { 0 } else { 4 * hq * sq }, 4];
        let starts = |n: u32| (0..=b).map(|i| i * n).collect::<Vec<u32>>();
        let of_heads = |n: u32, heads: u32, d: u32| rows(n) * u64::from(heads * d) * 2 + SLACK;
        if sums_of_o {
            self.buffer(of_heads(sq, hq, dv), "o")?;
            self.buffer(of_heads(sq, hq, dv), "do")?;
            self.buffer(rows(sq) * u64::from(hq) * 4 + SLACK, "d")?;
            (0..2).for_each(|_| self.ints(&strides(hq, dv, sq)));
            self.ints(&by_head);
            self.ints(&[total(sq), dv]);
            return if group {
                self.words(&starts(sq), "queries")?;
                self.words(&starts(sq), "padded queries")
            } else {
                Ok(())
            };
        }
        // dq is summed by atomics, in f32 or in 16 bits.
        let wide_sums = wide_sums || has("_convert");
        let sum_rows = if wide_sums { total(sq) } else { sq.next_multiple_of(16) };
        let sum_columns = match d_tile {
            _ if wide_sums => d,
            192 => 192,
            _ => 128,
        };
        let parts = if group && wide_sums { 1 } else { b };
        let size = if wide_sums { 4 } else { 2 };
        let sums = u64::from(parts * hq) * u64::from(sum_rows) * u64::from(sum_columns * size) + SLACK;
        if conversion {
            self.buffer(sums, "sums of dq")?;
            self.buffer(of_heads(sq, hq, d), "dq")?;
            let head = sum_rows * sum_columns * size;
            self.ints(&[head, if parts > 1 { hq.wrapping_mul(head) } else { 0 }, sum_columns * size]);
            self.ints(&strides(hq, d, sq));
            self.ints(&[total(sq), d]);
            return if group {
                self.words(&starts(sq), "queries")?;
                self.words(&starts(sq), "padded queries")
            } else {
                Ok(())
            };
        }
        let window = if windowed {
            let window = shape.needed(&["window", "window_size", "window_left"])?;
            [1 + shape.int("window_right") + sk - sq.min(sk), 1 + window + sq - sk.min(sq)]
        } else {
            [0, 0]
        };
        let converted = wide_sums || gfx950 && d_tile != 64;
        self.buffer(if converted { sums } else { of_heads(sq, hq, d) }, "dq")?;
        self.buffer(of_heads(sk, hq, d), "dk")?;
        self.buffer(of_heads(sk, hq, dv), "dv")?;
        self.buffer(of_heads(sq, hq, d), "q")?;
        self.buffer(of_heads(sk, hk, d), "k")?;
        self.buffer(of_heads(sk, hk, dv), "v")?;
        self.buffer(of_heads(sq, hq, dv), "do")?;
        self.buffer(rows(sq) * u64::from(hq) * 4 + SLACK, "lse")?;
        self.buffer(rows(sq) * u64::from(hq) * 4 + SLACK, "d")?;
        self.float((d as f32).powf(-0.5));
        self.float(std::f32::consts::LOG2_E);
        self.ints(&[total(sq), tile * hk * d * 2]);
        self.ints(&strides(hq, d, sq));
        self.int(hq / hk);
        self.ints(&strides(hk, d, sk));
        self.ints(&strides(hq, d, sk)[2..]);
        self.ints(&[total(sk), d, dv, hq]);
        self.ints(&strides(hk, dv, sk));
        self.ints(&strides(hq, dv, sq));
        self.ints(&strides(hq, d, sk)[..2]);
        self.ints(&strides(hq, dv, sk));
        self.int(by_head[0]);
        for (n, label) in [(sq, "queries"), (sk, "keys"), (sq, "padded queries"), (sk, "padded keys")] {
            if group {
                self.words(&starts(n), label)?;
            } else {
                self.null();
            }
        }
        self.int(if wide_sums { sq } else { sum_rows });
        self.ints(&window);
        Ok(())
    }

    /// Keys of each sequence of a decode.
    fn keys(shape: &Shape<'_>) -> Result<u32, String> {
        shape.needed(&[
            "ctx_len",
            "ctx_lens",
            "context_len",
            "kv_len",
            "seqlen_k",
            "seqlen_kv",
            "kv_seqlen",
            "seq_len",
            "seqlen",
            "sk",
            "N",
        ])
    }

    /// Paged decode.
    fn paged(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        let name = &shape.name;
        let group = name.split("gqa").nth(1).and_then(|s| s.split('_').next()?.parse().ok());
        let persistent = shape.has(&["ps"]);
        let queries = shape.first(&["qlen", "mtp"]);
        // Of a persistent kernel the name has the rows of a workgroup: heads that share keys, times queries.
        let rows = shape.named("qlen").filter(|_| persistent);
        let queries = queries.or(shape.named("qlen").filter(|_| !persistent)).unwrap_or(1);
        let group = shape.first(&["gqa", "gqa_ratio"]).or(group).or(rows.map(|rows| rows / queries));
        let group = group.filter(|n| *n > 0).ok_or("params: gqa is needed")?;
        if persistent {
            return self.paged_from_list(shape, group, queries);
        }
        let [hk, b, _] = shape.grid;
        let page = shape.first(&["block_size", "page_size", "page"]);
        let page = page.unwrap_or(if name.contains("gqa10") { 1024 } else { 16 });
        let n = Self::keys(shape)?;
        let d = shape.first(&["head_dim", "hdim", "head_size"]).unwrap_or(128);
        let quantized = !name.contains("noquant");
        let size = if quantized { 1 } else { 2 };
        let pages = n.div_ceil(page);
        let rows = u64::from(b) * u64::from(queries);
        let q_row = 2 * group * hk * d;
        self.buffer(rows * u64::from(q_row), "o")?;
        self.buffer(rows * u64::from(q_row) + SLACK, "q")?;
        let cache = u64::from(b * pages) * u64::from(page * hk * d) * size;
        self.buffer(cache + SLACK, "k")?;
        self.buffer(cache + SLACK, "v")?;
        self.words(&(0..b * pages).collect::<Vec<_>>(), "block table")?;
        self.words(&vec![n; b as usize], "lengths")?;
        for label in ["k_scale", "v_scale"] {
            self.optional(if quantized { u64::from(b * pages * page * hk) * 4 } else { 0 }, label)?;
        }
        self.float(std::f32::consts::LOG2_E / (d as f32).sqrt());
        let head = page * d * size as u32;
        self.ints(&[pages, hk, q_row, head * hk, head, queries - 1, group]);
        self.words(&(0..=b).map(|i| i * queries).collect::<Vec<_>>(), "first queries")
    }

    /// Paged decode over fp8 from a work list.
    fn paged_from_list(&mut self, shape: &Shape<'_>, group: u32, queries: u32) -> Result<(), String> {
        let b = shape.needed(&SEQUENCES)?;
        let hk = shape.first(&KEY_HEADS).unwrap_or(1);
        let n = Self::keys(shape)?;
        let d = shape.first(&["head_dim", "hdim", "head_size"]).unwrap_or(128);
        let per_page = shape.name.contains("perblock");
        let page = shape.first(&["block_size", "page_size", "page"]).or(shape.named("blk")).unwrap_or(1024);
        let pages = n.div_ceil(page);
        let ranges: Vec<u32> = (0..hk).map(|i| (i * group) | (((i + 1) * group) << 16)).collect();
        let (first, items, partial) = work_list(shape.grid[0], b, pages, queries, &ranges, |_| 0);
        let row = 2 * group * hk * d;
        let rows = u64::from(b * queries);
        let cache = u64::from(b * pages) * u64::from(page * hk * d);
        let scales = if per_page { 4 } else { 4 * page };
        self.buffer(rows * u64::from(row) + SLACK, "o")?;
        self.buffer(rows * u64::from(row) + SLACK, "q")?;
        self.buffer(cache + SLACK, "k")?;
        self.buffer(cache + SLACK, "v")?;
        self.words(&(0..b * pages).collect::<Vec<_>>(), "pages")?;
        self.words(&vec![n; b as usize], "lengths")?;
        for label in ["k_scale", "v_scale"] {
            self.buffer(u64::from(b * pages * hk) * u64::from(scales) + SLACK, label)?;
        }
        self.float(std::f32::consts::LOG2_E / (d as f32).sqrt());
        let head = page * d;
        self.ints(&[hk, row, head * hk, head, queries - 1, group]);
        self.words(&(0..=b).map(|i| i * queries).collect::<Vec<_>>(), "first queries")?;
        self.words(&(0..=b).map(|i| i * pages).collect::<Vec<_>>(), "first pages")?;
        self.words(&first, "first items")?;
        self.words(&items, "items")?;
        let sums = u64::from(partial.max(queries)) * u64::from(group * hk) * 4;
        self.buffer(sums * u64::from(d), "partial sums")?;
        self.buffer(sums, "lse of partial sums")?;
        self.ints(&[scales, scales * hk]);
        Ok(())
    }

    /// Decode over a latent key of 576 columns, 512 of them the value.
    fn latent(&mut self, shape: &Shape<'_>) -> Result<(), String> {
        const COLUMNS: u32 = 576;
        const VALUES: u64 = 512;
        let name = shape.name.to_ascii_lowercase();
        if name.contains("pfl") || name.contains("mla_v4") || shape.row.get("co_path").contains("/mla_v4/") {
            return Err(format!("not modelled: the arguments of {name} are not known"));
        }
        let persistent = shape.has(&["ps"]);
        let [workgroups, b, splits] = shape.grid;
        let (b, splits) = if persistent { (shape.needed(&SEQUENCES)?, 1) } else { (b, splits) };
        let heads = shape.first(&["nhead", "nheads", "num_heads", "gqa", "gqa_ratio", "heads", "h"]);
        let heads = heads.or(shape.named("gqaratio")).or(shape.named("qh")).or(shape.named("mqa"));
        let heads = heads.ok_or("params: nhead is needed")?;
        let queries =
            shape.first(&["qlen", "q_len", "decode_qlen", "mtp"]).or(shape.named("qseqlen")).unwrap_or(1);
        let page = shape.first(&["page_size", "page", "block_size"]).unwrap_or(1);
        let n = Self::keys(shape)?;
        let fp8 = |word: &str| name.contains(word);
        let (q_size, kv_size) =
            (if fp8("a8w8") { 1 } else { 2 }, if fp8("a8w8") || fp8("a16w8") { 1 } else { 2 });
        let (rows, parts) = (u64::from(b * queries), u64::from(splits));
        let pages = n.div_ceil(page);
        let last = (n - 1) % page + 1;
        // The last page of a sequence may be filled in part.
        let behind = |pages: u32| if pages == 0 { 0 } else { (pages - 1) * page + last };
        let (first, mut items, partial) = work_list(workgroups, b, pages, queries, &[0], behind);
        // Some lists count keys, not pages.
        if page > 1 && !shape.has(&["v3"]) {
            for item in items.chunks_mut(8) {
                let ends = item[0] * pages * page + n;
                item[4..6].iter_mut().for_each(|at| *at = (*at * page).min(ends));
            }
        }
        let parts = if persistent { u64::from(partial.max(1)) } else { rows * parts };
        self.buffer(parts * u64::from(heads) * VALUES * 4 + SLACK, "r")?;
        self.buffer(parts * u64::from(heads) * 4 + SLACK, "lse")?;
        self.buffer((rows + 64) * u64::from(heads * COLUMNS * q_size), "q")?;
        let key = COLUMNS * kv_size;
        self.buffer(u64::from(b * pages * page) * u64::from(key) + SLACK, "kv")?;
        self.words(&(0..=b).map(|i| i * pages).collect::<Vec<_>>(), "first pages")?;
        self.words(&(0..b * pages).collect::<Vec<_>>(), "pages")?;
        self.words(&vec![last; b as usize], "tokens of last pages")?;
        self.float((COLUMNS as f32).powf(-0.5));
        let row = heads * COLUMNS * q_size;
        // Kernels that take a head's queries together count heads.
        let own = shape.named("qh").filter(|qh| {
            queries > 1
                && shape.named("gqaratio") == Some(*qh)
                && (shape.has(&["v3"]) || *qh == 32 || *qh == 8)
        });
        let s_mqa = own.unwrap_or(heads * queries);
        self.ints(&[s_mqa, splits, queries * row, page * key, page.trailing_zeros()]);
        self.words(&(0..=b).map(|i| i * queries).collect::<Vec<_>>(), "first queries")?;
        if persistent {
            let tables = [first, items].map(|words| self.hidden(&words));
            let mut pointers = vec![];
            for table in tables {
                let base = table?;
                pointers.extend([base as u32, (base >> 32) as u32]);
            }
            pointers.resize(20, 0);
            self.words(&pointers, "work list")?;
            self.buffer(rows * u64::from(heads) * VALUES * 2 + SLACK, "o")?;
        } else {
            self.words(&(0..=b).map(|i| i * splits).collect::<Vec<_>>(), "first splits")?;
            self.null();
        }
        for (label, size) in [("q_scale", q_size), ("kv_scale", kv_size)] {
            self.optional(if size == 1 { 4 } else { 0 }, label)?;
        }
        self.int(u32::from(persistent));
        if persistent {
            self.buffer(rows * u64::from(heads) * 4 + SLACK, "lse of o")?;
            self.words(&(0..=b).map(|i| i * n).collect::<Vec<_>>(), "first keys of all ranks")?;
        } else {
            self.null();
            self.null();
        }
        self.ints(&[1, 0]);
        Ok(())
    }

    /// Words that no slot points to; their address.
    fn hidden(&mut self, words: &[u32]) -> Result<u64, String> {
        let slots = self.bytes.len();
        self.words(words, "work list")?;
        self.bytes.truncate(slots);
        Ok(self.buffers.last().map_or(0, |b| b.base))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{COLUMNS, Rows};
    use hk_codeobj::Arch;
    use hk_emu::MachineOptions;

    /// The arguments of a row of this code object, grid and parameters, in dwords, or why there are none.
    fn filled(path: &str, grid: [u32; 3], params: &str) -> Result<(Vec<u32>, Vec<Buffer>), String> {
        let mut out = csv::Writer::from_writer(vec![]);
        out.write_record(COLUMNS).expect("writes");
        let grid_text = grid.map(|n| n.to_string()).join("x");
        let field = |column: &str| match column {
            "co_path" => path.to_owned(),
            "grid" => grid_text.clone(),
            "params" => params.to_owned(),
            "tile" => "32x256".to_owned(),
            _ => String::new(),
        };
        out.write_record(COLUMNS.map(field)).expect("writes");
        let text = String::from_utf8(out.into_inner().expect("flushes")).expect("text");
        let rows = Rows::parse(&text).expect("well-formed");
        let arch = if path.contains("gfx950") { Arch::Gfx950 } else { Arch::Gfx942 };
        let machine = Machine::new(MachineOptions::default().arch(arch));
        let mut args = Arguments::new(&machine);
        fill(&rows.rows[0], grid, &mut args)?;
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        Ok((args.bytes.chunks(4).map(word).collect(), args.buffers))
    }

    #[test]
    fn attention_has_the_sizes_of_its_grid() {
        // 16 tiles of 256 queries, 8 heads, 2 sequences; causal: two tiles a workgroup.
        let plain = filled("hsa/gfx950/fmha_v3_fwd/fwd_hd128_bf16.co", [16, 8, 2], "{}").expect("filled");
        let causal =
            filled("hsa/gfx950/fmha_v3_fwd/fwd_hd128_bf16_causal.co", [8, 8, 2], "{}").expect("filled");
        for (words, buffers) in [&plain, &causal] {
            let slot = |i: usize| words[4 * i];
            assert_eq!(
                [slot(6), slot(11), slot(17), slot(18), slot(19), slot(20)],
                [4096, 1, 4096, 128, 128, 8]
            );
            assert_eq!(slot(7), 8 * 128 * 2, "bytes of a row of q");
            assert_eq!(buffers[0].bytes, 2 * 4096 * 8 * 128 * 2);
        }
        // A length that does not fill its tiles, and heads that share keys.
        let params = r#"{"seqlen": 4000, "nheads": 8, "nheads_k": 2}"#;
        let (words, _) =
            filled("hsa/gfx950/fmha_v3_fwd/fwd_hd128_bf16.co", [16, 8, 2], params).expect("filled");
        assert_eq!([words[4 * 6], words[4 * 11]], [4000, 4]);
        // A length that the grid contradicts is not that of the queries.
        let params = r#"{"seqlen": 512}"#;
        let (words, _) =
            filled("hsa/gfx950/fmha_v3_fwd/fwd_hd128_bf16.co", [16, 8, 2], params).expect("filled");
        assert_eq!(words[4 * 6], 4096);
    }

    #[test]
    fn decodes_have_a_page_list() {
        let params = r#"{"ctx_len": 1000, "nhead": 16}"#;
        let path = "hsa/gfx942/mla/mla_dec_stage1_bf16_a16w16_subQ16_mqa16.co";
        let (words, buffers) = filled(path, [1, 4, 2], params).expect("filled");
        assert_eq!([words[4 * 8], words[4 * 9]], [16, 2], "rows of a workgroup, splits");
        assert!(buffers.iter().any(|b| b.bytes == 4 * 4 * 1000), "a page of each key");
        let (words, _) =
            filled("hsa/gfx942/pa/pa_bf16_noquant_gqa8_1tg_4w.co", [2, 4, 1], params).expect("filled");
        assert_eq!([words[4 * 9], words[4 * 10], words[4 * 15]], [63, 2, 8], "pages, heads of keys, group");
    }

    #[test]
    fn persistent_decodes_have_all_keys_in_their_lists() {
        // Three sequences of 1000 keys over 8 workgroups: 375 keys each, and a sequence ends within the third and the sixth.
        let (first, items, partial) = work_list(8, 3, 1000, 2, &[0], |left| left);
        assert_eq!(first, [0, 1, 2, 4, 5, 6, 8, 9, 10]);
        let keys = |i: usize| [items[8 * i], items[8 * i + 4], items[8 * i + 5], items[8 * i + 6]];
        assert_eq!([keys(2), keys(3)], [[0, 750, 1000, 0], [1, 1000, 1125, 875]]);
        assert_eq!(items.chunks(8).map(|item| item[5] - item[4]).sum::<u32>(), 3000);
        assert_eq!(partial, 20, "two rows of each part");
        // A sequence that one workgroup has alone has no partial sums.
        let (_, items, partial) = work_list(3, 3, 1000, 2, &[0], |left| left);
        assert!(items.chunks(8).all(|item| item[1] == u32::MAX) && partial == 0);

        let params = r#"{"ctx_len": 1000, "batch": 3}"#;
        let path = "hsa/gfx942/mla/mla_a8w8_qh16_qseqlen1_gqaratio16_ps.co";
        let (words, buffers) = filled(path, [304, 1, 1], params).expect("filled");
        assert_eq!([words[4 * 8], words[4 * 9]], [16, 1], "rows of a workgroup, splits");
        assert!(buffers.iter().any(|b| b.bytes == 4 * 305), "the first item of each workgroup");
        let params = r#"{"ctx_len": 5000, "batch": 3, "qlen": 2, "num_kv_heads": 4}"#;
        let path = "hsa/gfx942/pa/pa_bf16_perblockFp8_blk256_1tg_4w_qlen16_msk1_ps.co";
        let (words, buffers) = filled(path, [304, 1, 1], params).expect("filled");
        let slot = |i: usize| words[4 * i];
        assert_eq!([slot(9), slot(11), slot(12), slot(13), slot(14)], [4, 4 * 256 * 128, 256 * 128, 1, 8]);
        assert!(buffers.iter().any(|b| b.bytes == 4 * 3 * 20), "pages of 256 keys");
    }

    #[test]
    fn gradients_have_three_launches() {
        let params = r#"{"seqlen": 4096, "nheads": 8, "nheads_k": 2, "batch": 2}"#;
        let of = |name: &str, grid| {
            filled(&format!("hsa/gfx950/fmha_v3_bwd/bwd_hd128_{name}.co"), grid, params).expect("filled")
        };
        let (words, buffers) = of("odo_bf16", [32, 8, 2]);
        let slot = |words: &[u32], i: usize| words[4 * i];
        assert_eq!([slot(&words, 3), slot(&words, 5), slot(&words, 12)], [256, 8 * 256, 4096]);
        assert_eq!(buffers[2].bytes, 2 * 8 * 4096 * 4 + SLACK, "a sum of each row and head");
        // Tiles of 256 keys, two of them a workgroup.
        let (words, buffers) = of("bf16_causal_a32_psskddv", [8, 8, 2]);
        assert_eq!([slot(&words, 11), slot(&words, 12), slot(&words, 16)], [4096, 256 * 2 * 256, 4]);
        assert_eq!([21, 22, 23, 24].map(|i| slot(&words, i)), [4096, 128, 128, 8]);
        assert_eq!(words.len(), 4 * 44);
        assert_eq!(buffers[0].bytes, 2 * 8 * 4096 * 128 * 4 + SLACK, "sums of dq in f32");
        let (words, _) = of("dq_convert_bf16", [64, 8, 2]);
        assert_eq!([slot(&words, 2), slot(&words, 3), slot(&words, 4)], [4096 * 512, 8 * 4096 * 512, 512]);
    }

    #[test]
    fn experts_have_the_formats_of_their_names() {
        let params = r#"{"token": 4, "expert": 8, "topk": 2, "model_dim": 512, "inter_dim": 256}"#;
        let of = |name: &str| {
            let path = format!("hsa/gfx950/fmoe/silu/fmoe_{name}_32x256.co");
            filled(&path, [1, 8, 1], params).expect("filled").1[2].bytes - SLACK
        };
        let fp8 = 8 * 2 * 256 * 512;
        assert_eq!(of("bf16_pertokenFp8_g1u1_silu_1tg"), fp8);
        assert_eq!(of("bf16_pertokenMXfp4_g1u1_vs_silu_2tg"), fp8 / 2);
        assert_eq!(
            of("bf16_noquantBf16_g1u0_atm_inlv_silu_1tg"),
            fp8,
            "one half of the rows, twice the bytes"
        );
    }

    #[test]
    fn what_is_missing_is_named() {
        for (path, want) in [
            ("hsa/gfx942/mla/mla_a8w8_qh16_qseqlen1_gqaratio16.co", "params: ctx_len is needed"),
            ("hsa/gfx942/mla/mla_a8w8_qh16_qseqlen1_gqaratio16_ps.co", "params: batch is needed"),
            ("hsa/gfx942/mla/mla_pfl_bf16_a16w16_causal_subQ16_mqa16.co", "not modelled: the arguments of"),
            ("hsa/gfx942/pa/pa_bf16_pertokenFp8_gqa16_1tg_4w_qlen16_msk1_ps.co", "params: batch is needed"),
            ("hsa/gfx942/fmha_v3_bwd/bwd_hd128_bf16_swa_a32_rtne_psskddv.co", "params: window is needed"),
            ("hsa/gfx942/fmoe/fmoe_fp8_blockscale_g1u1_subGU_256.co", "params: token is needed"),
            ("hsa/gfx942/i8gemm/a.co", "M: `` is no such number"),
            ("hsa/gfx942/topksoftmax/a.co", "not modelled: the arguments of family"),
        ] {
            let error = filled(path, [1, 1, 1], "{}").map(|_| ()).expect_err("refused");
            assert!(error.starts_with(want), "{path}: {error}");
        }
        let error = filled("hsa/gfx942/pa/a.co", [1, 1, 1], "[").map(|_| ()).expect_err("refused");
        assert!(error.starts_with("params: "), "{error}");
    }
}
