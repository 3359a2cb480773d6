//! Everything that is printed: tables, JSON, text.

use crate::Result;
use comfy_table::{CellAlignment, ContentArrangement, presets};
use hk_emu::Counters;
use serde::Serialize;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// A table, in a form that is Markdown, too.
pub struct Table(comfy_table::Table);

impl Table {
    /// Columns by their headers; a header that begins with `>` aligns its column to the right.
    pub fn new<'a>(headers: impl IntoIterator<Item = &'a str>) -> Self {
        let headers: Vec<&str> = headers.into_iter().collect();
        let mut table = comfy_table::Table::new();
        table.load_style(presets::ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(headers.iter().map(|h| h.trim_start_matches('>')));
        for (i, _) in headers.iter().enumerate().filter(|(_, h)| h.starts_with('>')) {
            if let Some(column) = table.column_mut(i) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        Self(table)
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.0.add_row(cells);
    }

    /// Cells wrap so that no line is longer than this.
    pub fn wrapped(mut self, width: u16) -> Self {
        self.0.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        self
    }

    /// Prints it.
    pub fn print(&self) -> Result<()> {
        print(&self.0)
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

static DISCARDED: AtomicBool = AtomicBool::new(false);

/// Discards what the commands of this process print from now on. For tests: the test runner does not capture it.
pub fn discard() {
    DISCARDED.store(true, Ordering::Relaxed);
}

/// Prints a text and a new line. A reader that has gone away, as `head`, is no failure.
pub fn print(text: impl Display) -> Result<()> {
    let discarded = DISCARDED.load(Ordering::Relaxed);
    let mut out: Box<dyn Write> =
        if discarded { Box::new(std::io::sink()) } else { Box::new(std::io::stdout().lock()) };
    match writeln!(out, "{text}") {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(()),
    }
}

/// Prints JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    print(serde_json::to_string_pretty(value)?)
}

/// What the emulator executed, by class of instruction, and what it counted of their accesses.
pub fn executed(c: &Counters) -> Table {
    let mut table = Table::new(["executed by the emulator", ">count", ">per wave"]);
    let instructions = [
        ("workgroups", c.workgroups),
        ("waves", c.waves),
        ("instructions", c.instructions),
        ("  vector ALU", c.valu),
        ("    transcendental", c.transcendental),
        ("    packed f32", c.packed_f32),
        ("  matrix", c.mfma),
        ("  scalar ALU", c.salu),
        ("  scalar memory", c.smem),
        ("  vector loads", c.vmem_loads),
        ("  vector stores", c.vmem_stores),
        ("  LDS", c.lds),
        ("  branches", c.branches),
        ("  waits", c.waits),
        ("  barriers", c.barriers),
        ("  others", c.other - c.waits - c.barriers),
        ("matrix passes", c.mfma_passes),
        ("matrix operations", c.matrix_flops),
        ("scalar bytes read", c.smem_bytes),
    ];
    let accesses = c.details.map(|d| {
        [
            ("waits between matrix instructions for all loads", d.drains),
            ("LDS clocks", d.lds_clocks),
            ("  of bank conflicts", d.lds_conflict_clocks),
            ("LDS bytes read", d.lds_read_bytes),
            ("LDS bytes written", d.lds_written_bytes),
            ("LDS atomics", d.lds_atomics),
            ("global atomics", d.global_atomics),
            ("scratch bytes", d.scratch_bytes),
        ]
    });
    for (what, n) in instructions.into_iter().chain(accesses.into_iter().flatten()) {
        let per_wave = if c.waves == 0 { 0.0 } else { n as f64 / c.waves as f64 };
        table.row([what.into(), n.to_string(), format!("{per_wave:.1}")]);
    }
    table
}

/// A number of bytes, readable.
pub fn bytes(n: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| n >> shift > 0) {
        Some((unit, shift)) if n.is_multiple_of(1 << shift) => format!("{} {unit}", n >> shift),
        Some((unit, shift)) => format!("{:.2} {unit}", n as f64 / (1u64 << shift) as f64),
        None => format!("{n} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_markdown() {
        let mut table = Table::new(["name", ">n"]);
        table.row(["a".into(), "1".into()]);
        table.row(["long".into(), "23".into()]);
        assert_eq!(table.to_string(), "| name |  n |\n|------|----|\n| a    |  1 |\n| long | 23 |");
    }

    #[test]
    fn bytes_are_readable() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(64 << 10), "64 KiB");
        assert_eq!(bytes((3 << 20) + (1 << 19)), "3.50 MiB");
        assert_eq!(bytes(192 << 30), "192 GiB");
    }
}
