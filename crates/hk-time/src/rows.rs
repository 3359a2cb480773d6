//! Launches of AITER's code objects as rows of a CSV file: `id, gpu, co_path, co_rev, kernel_symbol, family, M, N, K,
//! tile, params, grid, block, kernarg_bytes, extra_fill_bytes`. Other columns are passed through.

use std::collections::HashMap;
use std::path::Path;

use hk_codeobj::CodeObject;
use hk_emu::{Dispatch, Machine, MachineOptions};

use crate::arguments::{self, Arguments};
use crate::model::{Options, TimeError, Traced, trace};
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
        let (grid, block) = (self.dims("grid")?, self.dims("block")?);
        let mut args = Arguments::new(&machine);
        arguments::fill(self, grid, &mut args)?;
        args.bytes.resize(found.explicit_arg_bytes as usize, 0);
        let footprint: u64 = args.buffers.iter().map(|b| b.bytes).sum();
        let warm = (footprint as f64) * (ROTATED as f64) <= part.mall_bytes.value;
        let dispatch = Dispatch { grid, block, dynamic_lds: 0, args: &args.bytes };
        let mut buffers = args.buffers;
        buffers.sort_by_key(|b| b.base);
        let uneven = ["fmha", "/mla", "/pa"].iter().any(|part| self.get("co_path").contains(part));
        let filled = self.number::<f64>("extra_fill_bytes").unwrap_or(0.0);
        let options = Options { warm, exact, uneven, filled };
        trace(part, &machine, &module, kernel, &dispatch, &buffers, options).map_err(|e| e.to_string())
    }
}
