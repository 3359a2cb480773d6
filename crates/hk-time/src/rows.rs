//! Launches of AITER's code objects as rows of a CSV file: `id, gpu, co_path, co_rev, kernel_symbol, family, M, N, K,
//! tile, params, grid, block, kernarg_bytes, extra_fill_bytes`. Other columns are passed through.

use std::collections::HashMap;
use std::path::Path;

use hk_codeobj::CodeObject;
use hk_emu::{Dispatch, Machine, MachineOptions};
use serde_json::Value;

use crate::model::{Buffer, Options, TimeError, Traced, trace};
use crate::parts::Part;

/// Columns that a file of rows must have.
pub const COLUMNS: [&str; 15] = [
    "id",
    "gpu",
    "co_path",
    "co_rev",
    "kernel_symbol",
    "family",
    "M",
    "N",
    "K",
    "tile",
    "params",
    "grid",
    "block",
    "kernarg_bytes",
    "extra_fill_bytes",
];

/// Argument copies that AITER's tuner rotates: operands are in the memory-side cache if all of them fit.
const ROTATED: u64 = 101;

/// A row.
#[derive(Debug, Clone)]
pub struct Row {
    fields: HashMap<String, String>,
}

/// A file of rows.
#[derive(Debug, Clone)]
pub struct Rows {
    /// The columns in their order.
    pub columns: Vec<String>,
    /// The rows.
    pub rows: Vec<Row>,
}

impl Rows {
    /// From the text of a file.
    ///
    /// # Errors
    /// What is wrong with the file, the columns that it lacks among it.
    pub fn parse(text: &str) -> Result<Rows, String> {
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let columns: Vec<String> =
            reader.headers().map_err(|e| e.to_string())?.iter().map(str::to_owned).collect();
        let missing: Vec<_> = COLUMNS.into_iter().filter(|c| !columns.iter().any(|have| have == c)).collect();
        if !missing.is_empty() {
            return Err(format!("missing columns: {}", missing.join(", ")));
        }
        let mut rows = vec![];
        for record in reader.records() {
            let record = record.map_err(|e| e.to_string())?;
            let fields = columns.iter().cloned().zip(record.iter().map(str::to_owned)).collect();
            rows.push(Row { fields });
        }
        Ok(Rows { columns, rows })
    }
}

impl Row {
    /// A field; empty if the file has no such column.
    pub fn get(&self, column: &str) -> &str {
        self.fields.get(column).map_or("", String::as_str)
    }

    /// A number.
    ///
    /// # Errors
    /// That it is none.
    pub fn number<T: std::str::FromStr>(&self, column: &str) -> Result<T, String> {
        self.get(column).parse().map_err(|_| format!("{column}: `{}` is no such number", self.get(column)))
    }

    fn dims<const D: usize>(&self, column: &str) -> Result<[u32; D], String> {
        let dims: Vec<u32> = self.get(column).split('x').map_while(|n| n.parse().ok()).collect();
        <[u32; D]>::try_from(dims).ok().filter(|dims| !dims.contains(&0)).ok_or_else(|| {
            format!("{column}: `{}`, expected {D} sizes with x between them", self.get(column))
        })
    }

    /// The path of its code object; an error if that leaves the directory of objects.
    fn object(&self, objects: &Path) -> Result<std::path::PathBuf, String> {
        let relative = Path::new(self.get("co_rev")).join(self.get("co_path"));
        let plain = relative.components().all(|c| matches!(c, std::path::Component::Normal(_)));
        if plain { Ok(objects.join(relative)) } else { Err(format!("co_path: `{}`", self.get("co_path"))) }
    }

    /// Traces the launch of a row, with objects as `<co_rev>/<co_path>` in `objects`.
    ///
    /// # Errors
    /// Why it cannot be modelled.
    pub fn trace(&self, objects: &Path, exact: bool) -> Result<Traced, String> {
        let part = Part::named(self.get("gpu")).ok_or_else(|| {
            let names: Vec<_> = crate::parts::PARTS.iter().map(|p| p.name).collect();
            format!("gpu: no part `{}`, expected one of {}", self.get("gpu"), names.join(", "))
        })?;
        let path = self.object(objects)?;
        let image = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let object = CodeObject::parse(&image).map_err(|e| e.to_string())?;
        if object.arch != part.arch {
            let (target, object) = (part.arch, object.arch);
            return Err(TimeError::Target { part: part.name, target, object }.to_string());
        }
        let kernel = self.get("kernel_symbol");
        let found = object.kernel(kernel).ok_or_else(|| format!("kernel_symbol: no kernel `{kernel}`"))?;
        let machine = Machine::new(MachineOptions::default().arch(part.arch).allow_misaligned(true));
        let module = machine.load(&image).map_err(|e| e.to_string())?;
        let mut args = Arguments { machine: &machine, bytes: vec![], slot: 16, buffers: vec![] };
        self.arguments(&mut args)?;
        args.bytes.resize(found.explicit_arg_bytes as usize, 0);
        let footprint: u64 = args.buffers.iter().map(|b| b.bytes).sum();
        let warm = (footprint as f64) * (ROTATED as f64) <= part.mall_bytes.value;
        let (grid, block) = (self.dims("grid")?, self.dims("block")?);
        let dispatch = Dispatch { grid, block, dynamic_lds: 0, args: &args.bytes };
        let mut buffers = args.buffers;
        buffers.sort_by_key(|b| b.base);
        let filled = self.number::<f64>("extra_fill_bytes").unwrap_or(0.0);
        trace(part, &machine, &module, kernel, &dispatch, &buffers, Options { warm, exact, filled })
            .map_err(|e| e.to_string())
    }

    /// The arguments of a kernel by the folder that its object is in.
    fn arguments(&self, args: &mut Arguments<'_>) -> Result<(), String> {
        let [m, n, k] = ["M", "N", "K"].map(|column| self.number::<u32>(column));
        let (m, n, k) = (m?, n?, k?);
        let params: Value = serde_json::from_str(self.get("params")).map_err(|e| format!("params: {e}"))?;
        let text = |name: &str| params.get(name).map_or(String::new(), |v| v.to_string().replace('"', ""));
        let int = |name: &str| text(name).parse::<u32>().unwrap_or(0);
        let (m64, n64, k64) = (u64::from(m), u64::from(n), u64::from(k));
        let path = self.get("co_path").to_owned();
        let [_, _, split] = self.dims::<3>("grid")?;
        if path.contains("/bf16gemm/") {
            let half = !text("outdtype").contains("float32");
            let out = if half { 2 } else { 4 };
            let biased = text("bias").eq_ignore_ascii_case("true");
            args.buffer(m64 * n64 * out, "d")?;
            args.int(0);
            args.buffer(m64 * k64 * 2, "a")?;
            args.buffer(n64 * k64 * 2, "b")?;
            args.float(1.0);
            args.float(0.0);
            let row = n * out as u32;
            args.ints(&[row, 0, row, 0, 2 * k, 0, 2 * k, 0, m, n, k, split, u32::from(half)]);
            if biased {
                args.buffer(n64 * 2, "bias")?
            } else {
                args.int(0)
            }
            args.int(u32::from(biased));
            args.buffer(4 * 16 * 64, "semaphore")
        } else if path.contains("/i8gemm/") {
            args.buffer(m64 * n64 * 2, "c")?;
            args.buffer(m64 * k64, "a")?;
            args.buffer(n64 * k64, "b")?;
            args.buffer(m64 * 4, "a_scale")?;
            args.buffer(n64 * 4, "b_scale")?;
            args.buffer(n64 * 4, "bias")?;
            args.ints(&[m, n, k, k, k, 2 * n, int("splitK").max(1)]);
            Ok(())
        } else if path.contains("/fp8gemm_blockscale/") {
            args.buffer(m64 * n64 * 2, "c")?;
            args.buffer(m64 * k64, "a")?;
            args.buffer(n64 * k64, "b")?;
            args.buffer(m64 * k64.div_ceil(128) * 4, "a_scale")?;
            args.buffer(n64.div_ceil(128) * k64.div_ceil(128) * 4, "b_scale")?;
            args.buffer(n64 * 4, "bias")?;
            args.ints(&[m, n, k, k, k, 2 * n, int("splitK").max(1), m, n.div_ceil(128), k.div_ceil(128)]);
            Ok(())
        } else if path.contains("/f4gemm/") {
            let padded = |rows: u64| rows.next_multiple_of(256);
            let scales = k64.div_ceil(32).next_multiple_of(8);
            args.buffer(padded(m64) * n64 * 2, "d")?;
            args.int(0);
            args.buffer(m64 * k64 / 2, "a")?;
            args.buffer(n64 * k64 / 2, "b")?;
            args.float(1.0);
            args.float(0.0);
            args.ints(&[0, 0, n, 0, k, 0, k, 0, m, n, k]);
            args.buffer(padded(m64) * scales, "a_scale")?;
            args.buffer(padded(n64) * scales, "b_scale")?;
            args.ints(&[scales as u32, 0, scales as u32, 0, int("log2_k_split")]);
            Ok(())
        } else if path.contains("/fmoe/") && path.contains("blockscaleFp8_g1u1") {
            let [_, tile] = self.dims::<2>("tile")?;
            let [gx, gy, _] = self.dims::<3>("grid")?;
            let persistent = path.contains("_ps_");
            let route = Route {
                tokens: int("token"),
                experts: int("expert"),
                topk: int("topk"),
                block: int("block_m"),
                blocks: if persistent { None } else { Some(gy) },
            };
            let (dim, inter) = (int("model_dim"), int("inter_dim"));
            args.fused(&route, dim, inter, tile, if persistent { gx } else { 0 })
        } else {
            let family = self.get("family");
            Err(format!("not modelled: the arguments of family {family}, {path}, are not known"))
        }
    }
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
        let mut state = 1u64;
        let mut random = |n: u32| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (((state >> 33) * u64::from(n)) >> 31) as u32
        };
        let mut of_expert: Vec<Vec<u32>> = vec![vec![]; self.experts as usize];
        let mut order: Vec<u32> = (0..self.experts).collect();
        for token in 0..self.tokens {
            for place in 0..self.topk {
                let other = place + random(self.experts - place);
                order.swap(place as usize, other as usize);
                of_expert[order[place as usize] as usize].push(token | place << 24);
            }
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
}

/// Arguments in slots, and the buffers among them.
struct Arguments<'a> {
    machine: &'a Machine,
    bytes: Vec<u8>,
    slot: usize,
    buffers: Vec<Buffer>,
}

impl Arguments<'_> {
    fn push(&mut self, bytes: &[u8]) {
        let end = self.bytes.len() + self.slot;
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(end, 0);
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

    /// A buffer that holds words.
    fn words(&mut self, words: &[u32], label: &str) -> Result<(), String> {
        self.buffer(4 * words.len() as u64, label)?;
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let base = self.buffers.last().map_or(0, |b| b.base);
        self.machine.write(base, &bytes).map_err(|e| e.to_string())
    }

    /// Arguments of a fused MoE kernel with fp8 values, and scales of 128 columns of x and of 128 x 128 of weights.
    fn fused(
        &mut self,
        route: &Route,
        dim: u32,
        inter: u32,
        tile: u32,
        workgroups: u32,
    ) -> Result<(), String> {
        if [route.tokens, route.experts, route.topk, route.block, dim, inter].contains(&0)
            || route.topk > route.experts
        {
            return Err("params: token, expert, topk, block_m, model_dim and inter_dim are needed".to_owned());
        }
        let (ids, of_block, valid) = route.sorted();
        let (d, i, e, t) =
            (u64::from(dim), u64::from(inter), u64::from(route.experts), u64::from(route.tokens));
        // Kernels read ahead of what they need.
        let slack = 1 << 18;
        let scales = |rows: u64, columns: u64| rows.div_ceil(128) * columns.div_ceil(128) * 4;
        self.buffer(t * d * 2, "o")?;
        self.buffer(t * d + slack, "x")?;
        self.buffer(e * 2 * i * d + slack, "w1")?;
        self.words(&[valid, route.tokens], "valid ids")?;
        self.buffer(e * i * d + slack, "w2")?;
        self.buffer(t * d.div_ceil(128) * 4 + slack, "x_scale")?;
        self.buffer(e * scales(2 * i, d) + slack, "w1_scale")?;
        self.buffer(e * scales(d, i) + slack, "w2_scale")?;
        self.int(0);
        self.words(&ids, "sorted ids")?;
        self.buffer(4 * ids.len() as u64 + slack, "sorted weights")?;
        self.words(&of_block, "experts of blocks")?;
        self.ints(&[dim, inter, route.tokens, route.experts, dim, dim, inter, 2 * dim]);
        self.ints(&[
            2 * inter * dim,
            inter * dim,
            scales(2 * i, d) as u32,
            scales(d, i) as u32,
            4 * inter,
            route.topk,
        ]);
        let slices = inter.div_ceil(tile);
        self.ints(&[workgroups / slices * slices, slices]);
        Ok(())
    }

    fn buffer(&mut self, bytes: u64, label: &str) -> Result<(), String> {
        let base = self.machine.alloc_zeroed(bytes, 4096, label).map_err(|e| e.to_string())?;
        self.buffers.push(Buffer { base, bytes });
        self.push(&base.to_le_bytes());
        Ok(())
    }
}
