//! `hk devices`.

use crate::Result;
use crate::out::{self, Table};
use hk_core::Device;
use serde::Serialize;

/// Options of `hk devices`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// A device string, and what answers to it or why nothing does.
#[derive(Serialize)]
struct Row {
    device: String,
    name: Option<String>,
    target: Option<String>,
    compute_units: Option<u32>,
    wave_size: Option<u32>,
    lds_bytes: Option<u32>,
    memory_bytes: Option<u64>,
    error: Option<String>,
}

pub fn run(args: &Args) -> Result<()> {
    let rows: Vec<Row> = Device::available()
        .into_iter()
        .map(|(device, result)| {
            let (info, error) = match result {
                Ok(info) => (Some(info), None),
                Err(e) => (None, Some(e.to_string())),
            };
            let info = info.as_ref();
            Row {
                device,
                name: info.map(|i| i.name.clone()),
                target: info.map(|i| i.arch.to_string()),
                compute_units: info.map(|i| i.compute_units),
                wave_size: info.map(|i| i.wave_size),
                lds_bytes: info.map(|i| i.lds_per_workgroup),
                memory_bytes: info.map(|i| i.total_memory_bytes),
                error,
            }
        })
        .collect();
    if args.json {
        return out::json(&rows);
    }
    let mut table = Table::new(["device", "name", "target", ">CUs", ">wave", ">LDS", ">memory"]);
    for row in rows.iter().filter(|r| r.error.is_none()) {
        table.row([
            row.device.clone(),
            row.name.clone().unwrap_or_default(),
            row.target.clone().unwrap_or_default(),
            row.compute_units.unwrap_or_default().to_string(),
            row.wave_size.unwrap_or_default().to_string(),
            out::bytes(row.lds_bytes.unwrap_or_default().into()),
            out::bytes(row.memory_bytes.unwrap_or_default()),
        ]);
    }
    table.print()?;
    rows.iter().filter_map(|r| r.error.as_ref()).try_for_each(out::print)
}
