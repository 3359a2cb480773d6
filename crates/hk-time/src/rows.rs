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
    "id", "gpu", "co_path", "co_rev", "kernel_symbol", "family", "M", "N", "K", "tile", "params", "grid", "block",
    "kernarg_bytes", "extra_fill_bytes",
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
        <[u32; D]>::try_from(dims)
            .ok()
            .filter(|dims| !dims.contains(&0))
            .ok_or_else(|| format!("{column}: `{}`, expected {D} sizes with x between them", self.get(column)))
    }

    /// Whether `co_path` leaves the directory of objects.
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
        trace(part, &machine, &module, kernel, &dispatch, &buffers, Options { warm, exact })
            .map_err(|e| e.to_string())
    }

    /// The arguments of a kernel by the folder that its object is in.
    fn arguments(&self, args: &mut Arguments<'_>) -> Result<(), String> {
        let [m, n, k] = ["M", "N", "K"].map(|column| self.number::<u32>(column));
        let (m, n, k) = (m?, n?, k?);
        let params: Value =
            serde_json::from_str(self.get("params")).map_err(|e| format!("params: {e}"))?;
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
            if biased { args.buffer(n64 * 2, "bias")? } else { args.int(0) }
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
        } else {
            let family = self.get("family");
            Err(format!("not modelled: the arguments of family {family}, {path}, are not known"))
        }
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

    fn buffer(&mut self, bytes: u64, label: &str) -> Result<(), String> {
        let base = self.machine.alloc_zeroed(bytes, 4096, label).map_err(|e| e.to_string())?;
        self.buffers.push(Buffer { base, bytes });
        self.push(&base.to_le_bytes());
        Ok(())
    }
}
