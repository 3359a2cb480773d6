//! `cargo xtask status --isa`: what the emulator does of every instruction.

use std::collections::HashSet;
use std::fs;
use std::process::Stdio;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use crate::{Failure, Result, demo, run};

/// The instructions that tests compare with a model, one name a line.
const TESTED: &str = "crates/hk-emu/tests/tested.txt";

/// Columns of the table behind its classes.
const CLASSES: [&str; 5] = ["exact", "spec-bounded", "approximate", "unverified", "refused"];

/// An instruction on one target, as `hk status --isa` prints it.
#[derive(Debug, Serialize, Deserialize)]
struct Instruction {
    target: String,
    group: String,
    name: String,
    decoded: bool,
    executed: bool,
    #[serde(default)]
    tested: bool,
    fidelity: String,
    reason: String,
}

/// Prints the tables, each instruction (`list`), or all of it as JSON.
pub(crate) fn status(json: bool, list: bool) -> Result {
    let output = demo::hk("status")?.arg("--isa").stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(Failure(format!("`hk status --isa` failed ({})", output.status)));
    }
    let mut instructions: Vec<Instruction> = serde_json::from_slice(&output.stdout)?;
    let text = fs::read_to_string(run::workspace_root().join(TESTED)).unwrap_or_default();
    let tested: HashSet<&str> = text.lines().map(str::trim).collect();
    for instruction in &mut instructions {
        instruction.tested = tested.contains(&*instruction.name);
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&instructions)?);
        return Ok(());
    }
    if list {
        println!("{}", listing(&instructions));
        return Ok(());
    }
    let mut targets: Vec<&str> = instructions.iter().map(|i| &*i.target).collect();
    targets.dedup();
    for target in targets {
        println!("{target}\n{}\n", summary(instructions.iter().filter(|i| i.target == target)));
    }
    Ok(())
}

fn table(headers: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(headers);
    table
}

/// Counts by group, and their sums.
fn summary<'a>(instructions: impl Iterator<Item = &'a Instruction>) -> Table {
    let mut rows: Vec<(&str, Vec<usize>)> = Vec::new();
    let mut total = vec![0; 4 + CLASSES.len()];
    for i in instructions {
        let classes = CLASSES.map(|class| i.fidelity == class);
        let facts = [true, i.decoded, i.executed, i.tested].into_iter().chain(classes);
        let at = rows.iter().position(|(group, _)| *group == i.group).unwrap_or_else(|| {
            rows.push((&i.group, vec![0; total.len()]));
            rows.len() - 1
        });
        for (n, fact) in facts.enumerate() {
            rows[at].1[n] += usize::from(fact);
            total[n] += usize::from(fact);
        }
    }
    rows.push(("total", total));
    let mut headers = vec!["encoding", "instructions", "decoded", "executed", "tested"];
    headers.extend(CLASSES);
    let mut table = table(&headers);
    for (group, counts) in rows {
        table.add_row(std::iter::once(group.to_owned()).chain(counts.iter().map(usize::to_string)));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn listing(instructions: &[Instruction]) -> Table {
    let mut table = table(&["target", "encoding", "instruction", "executed", "tested", "fidelity", "reason"]);
    let word = |yes: bool| if yes { "yes" } else { "no" };
    for i in instructions {
        table.add_row([
            &*i.target,
            &*i.group,
            &*i.name,
            word(i.executed),
            word(i.tested),
            &*i.fidelity,
            &*i.reason,
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_by_group() {
        let row = |group: &str, name: &str, executed, tested, fidelity: &str| Instruction {
            target: "gfx942".into(),
            group: group.into(),
            name: name.into(),
            decoded: true,
            executed,
            tested,
            fidelity: fidelity.into(),
            reason: "r".into(),
        };
        let rows = [
            row("SOP1", "A", true, true, "exact"),
            row("SOP1", "B", true, false, "unverified"),
            row("DS", "C", false, false, "refused"),
        ];
        let text = summary(rows.iter()).to_string();
        let words: Vec<Vec<&str>> = text
            .lines()
            .skip(2)
            .map(|l| l.split('|').map(str::trim).filter(|w| !w.is_empty()).collect())
            .collect();
        assert_eq!(
            words,
            [
                ["SOP1", "2", "2", "2", "1", "1", "0", "0", "1", "0"],
                ["DS", "1", "1", "0", "0", "0", "0", "0", "0", "1"],
                ["total", "3", "3", "2", "1", "1", "0", "0", "1", "1"],
            ]
        );
        assert!(listing(&rows).to_string().contains("| no "));
    }
}
