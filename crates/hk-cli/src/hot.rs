//! Where a kernel spends its instructions: counters by source line.

use crate::Result;
use crate::out::{self, Table};
use hk_core::{Counters, Profile};

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
    /// Full drains (vmcnt(0)) between matrix instructions.
    Drains,
}

impl Column {
    const ALL: [Column; 7] = [
        Column::Instructions,
        Column::Valu,
        Column::Passes,
        Column::Lines,
        Column::Lds,
        Column::Conflicts,
        Column::Drains,
    ];

    fn of(self, c: &Counters) -> u64 {
        let d = c.details.unwrap_or_default();
        match self {
            Column::Instructions => c.instructions,
            Column::Valu => c.valu,
            Column::Passes => c.mfma_passes,
            Column::Lines => d.global_read_lines + d.global_written_lines,
            Column::Lds => d.lds_clocks,
            Column::Conflicts => d.lds_conflict_clocks,
            Column::Drains => d.drains,
        }
    }
}

/// Prints the `top` lines of each kernel that have the most of `by`.
pub fn print(profiles: &[Profile], by: Column, top: usize) -> Result<()> {
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
            ">drains",
        ]);
        let total = by.of(&profile.counters);
        let mut add = |line: String, c: &Counters| {
            let share = if total == 0 { 0.0 } else { 100.0 * by.of(c) as f64 / total as f64 };
            let share = format!("{share:.1} %");
            let counts = Column::ALL.map(|column| column.of(c).to_string());
            table.row([line, share].into_iter().chain(counts));
        };
        let mut lines: Vec<_> = profile.lines.iter().filter(|l| by.of(&l.counters) > 0).collect();
        lines.sort_by_key(|l| std::cmp::Reverse(by.of(&l.counters)));
        for line in lines.iter().take(top) {
            let name = line.file.as_ref().map_or("-".into(), |file| format!("{file}:{}", line.line));
            add(name, &line.counters);
        }
        if lines.len() > top {
            let mut rest = Counters::default();
            lines[top..].iter().for_each(|line| rest += line.counters);
            add(format!("{} more lines", lines.len() - top), &rest);
        }
        add("total".into(), &profile.counters);
        table.print()?;
    }
    Ok(())
}
