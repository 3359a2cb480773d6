//! Where a kernel spends its instructions: counters by source line.

use crate::Result;
use crate::out::{self, Table};
use hk_core::{Counters, Profile};
use std::collections::HashMap;
use std::path::Path;

/// What lines are sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Column {
    /// Wave instructions.
    Instructions,
    /// Vector-ALU instructions.
    Valu,
    /// Passes of matrix instructions.
    Passes,
    /// 128-byte lines of global loads and stores.
    Lines,
    /// LDS clocks.
    Lds,
    /// LDS clocks that bank conflicts cost.
    Conflicts,
}

impl Column {
    const ALL: [Column; 6] =
        [Column::Instructions, Column::Valu, Column::Passes, Column::Lines, Column::Lds, Column::Conflicts];

    fn of(self, c: &Counters) -> u64 {
        let d = c.details.unwrap_or_default();
        match self {
            Column::Instructions => c.instructions,
            Column::Valu => c.valu,
            Column::Passes => c.mfma_passes,
            Column::Lines => d.global_read_lines + d.global_written_lines,
            Column::Lds => d.lds_clocks,
            Column::Conflicts => d.lds_conflict_clocks,
        }
    }
}

/// Longest piece of source that is shown.
const TEXT: usize = 60;

/// Prints the `top` lines of each kernel that have the most of `by`.
pub fn print(profiles: &[Profile], by: Column, top: usize) -> Result<()> {
    let mut sources = Sources::default();
    for profile in profiles {
        let r = &profile.resources;
        out::print(format_args!(
            "{}: {} waves of {} VGPRs, {} AGPRs; {} waves per SIMD",
            profile.kernel, profile.counters.waves, r.vgprs, r.agprs, r.waves_per_simd
        ))?;
        let mut table = Table::new([
            "line",
            ">share",
            ">instructions",
            ">vector ALU",
            ">matrix passes",
            ">128 B lines",
            ">LDS clocks",
            ">conflicts",
            "source",
        ]);
        let total = by.of(&profile.counters);
        let mut add = |line: String, c: &Counters, text: String| {
            let share = if total == 0 { 0.0 } else { 100.0 * by.of(c) as f64 / total as f64 };
            let [instructions, valu, passes, lines, lds, conflicts] =
                Column::ALL.map(|column| column.of(c).to_string());
            let share = format!("{share:.1} %");
            table.row([line, share, instructions, valu, passes, lines, lds, conflicts, text]);
        };
        let mut lines: Vec<_> = profile.lines.iter().filter(|l| by.of(&l.counters) > 0).collect();
        lines.sort_by_key(|l| std::cmp::Reverse(by.of(&l.counters)));
        for line in lines.iter().take(top) {
            let (name, text) = match &line.file {
                Some(file) => (format!("{}:{}", short(file), line.line), sources.line(file, line.line)),
                None => ("-".into(), String::new()),
            };
            add(name, &line.counters, text);
        }
        if lines.len() > top {
            let mut rest = Counters::default();
            lines[top..].iter().for_each(|line| rest += line.counters);
            add(format!("{} more lines", lines.len() - top), &rest, String::new());
        }
        add("total".into(), &profile.counters, String::new());
        table.print()?;
    }
    Ok(())
}

/// The name without its directories.
fn short(file: &str) -> &str {
    Path::new(file).file_name().and_then(|name| name.to_str()).unwrap_or(file)
}

/// Source files, as far as they are there.
#[derive(Default)]
struct Sources(HashMap<String, Vec<String>>);

impl Sources {
    /// The text of a line, in one cell of a table.
    fn line(&mut self, file: &str, line: u32) -> String {
        let lines = self.0.entry(file.to_owned()).or_insert_with(|| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            text.lines().map(|line| line.trim().replace('|', "\\|")).collect()
        });
        let text = lines.get((line as usize).wrapping_sub(1)).map_or("", String::as_str);
        match text.char_indices().nth(TEXT) {
            Some((end, _)) => format!("{}...", &text[..end]),
            None => text.to_owned(),
        }
    }
}
