//! `hk facts`: what the emulator counts of every operator at the sizes of real models; `docs/facts`.

mod attention;
mod backward;
mod busy;
mod decode;
mod experts;
mod latent;
mod logits;
mod merges;
mod pod;
mod sage;

use crate::out::{self, Table};
use crate::{Failure, Result, list};
use hk_core::registry::{Case, HostCall, Operator};
use hk_core::{Arch, Counters, Device, Profile};
use hk_emu::Costs;
use std::fs;
use std::path::PathBuf;

/// Options of `hk facts`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = "Counts, not times: an emulated GPU has no clock. Where the two targets differ, gfx942 comes first.\n\n\
    bytes      distinct bytes read and written, over what any implementation has to move\n\
    by 16      share of the bytes that lanes move 16 at a time\n\
    waves      waves launched, all kernels\n\
    VALU       vector-ALU instructions of a wave, without matrix instructions\n\
    per line   instructions of all waves for each 128-byte line of output\n\
    in flight  lines that loads of a wave have outstanding at most, averaged over waves\n\
    drains     full drains (vmcnt(0)) of a wave between matrix instructions\n\
    LDS        clocks of LDS accesses over what they take without bank conflicts\n\
    matrix     clocks of the matrix units over those of the busiest of matrix, vector issue, LDS and global memory\n\
    VGPRs, waves/SIMD, scratch bytes: of each kernel"
)]
pub struct Args {
    /// Only this family, such as hk-norm or norm.
    #[arg(long)]
    family: Option<String>,
    /// Only operators whose name contains this.
    #[arg(long, value_name = "TEXT")]
    op: Option<String>,
    /// Write each family's table to DIR/FAMILY.md: `hk facts --update docs/facts`.
    #[arg(long, value_name = "DIR", conflicts_with = "op")]
    update: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    let chosen = list::chosen(args.family.as_deref())?;
    let named = |op: &&&'static Operator| args.op.as_ref().is_none_or(|text| op.name.contains(text));
    let operators: Vec<_> = chosen.iter().filter(named).copied().collect();
    let Some(directory) = &args.update else { return out::print(tables(&operators)?) };
    for of_family in operators.chunk_by(|a, b| a.family == b.family) {
        let family = of_family.first().map_or("", |op| op.family);
        let path = directory.join(format!("{family}.md"));
        let new = document(family, &tables(of_family)?);
        fs::create_dir_all(directory).map_err(|e| Failure::file(directory, e))?;
        fs::write(&path, new).map_err(|e| Failure::file(&path, e))?;
    }
    Ok(())
}

/// The table of the operators, and what belongs to one of them alone.
fn tables(operators: &[&'static Operator]) -> Result<String> {
    let all = table(operators)?.to_string();
    let has = |name: &str| operators.iter().any(|op| op.name == name);
    type Section = (&'static str, &'static str, fn() -> Result<Table>);
    let sections: &[Section] = &[
        ("mha", attention::TITLE, attention::table),
        ("mha_fused_bwd", backward::TITLE, backward::table),
        ("pa_decode", decode::TITLE, decode::table),
        ("mla_decode_rope", latent::TITLE, latent::table),
        ("mla_decode_rope", merges::LATENT_TITLE, merges::latent_table),
        ("mha", busy::TITLE, busy::table),
        ("pa_decode", merges::TITLE, merges::table),
        ("pod_attn", pod::TITLE, pod::table),
        ("moe_op", experts::TITLE, experts::table),
        ("fp8_mqa_logits", logits::TITLE, logits::table),
        ("sage_attention", sage::TITLE, sage::table),
    ];
    sections.iter().filter(|(op, ..)| has(op)).try_fold(all, |text, (_, title, table)| {
        let table = table()?;
        Ok(format!("{text}\n\n{title}\n\n{table}"))
    })
}

/// The file of a family.
fn document(family: &str, table: &str) -> String {
    format!(
        "<!-- Generated: cargo run --release -p hk-cli -- facts --family {family} --update docs/facts -->\n\n\
         # Counted facts of {family}\n\n\
         Counts of the emulator at the sizes of real models, not times. Where the two targets differ, gfx942 comes first. \
         `hk\nfacts --help` explains the columns.\n\n{table}\n"
    )
}

/// Columns of the table.
const COLUMNS: [&str; 14] = [
    "operator",
    "case",
    ">bytes",
    ">by 16",
    ">waves",
    ">VALU",
    ">per line",
    ">in flight",
    ">drains",
    ">LDS",
    ">matrix",
    ">VGPRs",
    ">waves/SIMD",
    ">scratch",
];

fn table(operators: &[&'static Operator]) -> Result<Table> {
    let mut rows: Vec<Vec<String>> = vec![];
    for op in operators {
        for case in op.cases {
            let [a, b] = Arch::AMD.map(|arch| Facts::count(op, case, arch));
            let (a, b) = (a?.map(|f| f.cells()), b?.map(|f| f.cells()));
            let name = if case.label == op.cases[0].label { format!("`{}`", op.name) } else { String::new() };
            rows.push(
                [name, case.label.into()]
                    .into_iter()
                    .chain((0..COLUMNS.len() - 2).map(|i| both(&a, &b, i)))
                    .collect(),
            );
        }
    }
    // Columns without a value are left out.
    let says = |column: &usize| rows.iter().any(|row| row[*column] != "-");
    let columns: Vec<usize> = (0..COLUMNS.len()).filter(says).collect();
    let mut table = Table::new(columns.iter().map(|&i| COLUMNS[i]));
    for row in &rows {
        table.row(columns.iter().map(|&i| row[i].clone()));
    }
    Ok(table)
}

/// A cell of both targets.
fn both<const N: usize>(a: &Option<[String; N]>, b: &Option<[String; N]>, i: usize) -> String {
    match (a, b) {
        (Some(a), Some(b)) if a[i] != b[i] => format!("{} / {}", a[i], b[i]),
        (Some(cells), _) | (None, Some(cells)) => cells[i].clone(),
        (None, None) => "-".into(),
    }
}

fn ratio(a: u64, b: u64, digits: usize) -> String {
    match b {
        0 => "-".into(),
        b => format!("{:.*}", digits, a as f64 / b as f64),
    }
}

/// What a call's kernels count on an emulated device. None for a case of other targets.
fn profiles(call: &HostCall, label: &str, device: &str) -> Result<Option<Vec<Profile>>> {
    let op = call.operator();
    let stream = Device::open(device)?.create_stream()?;
    match op.execute(&stream, call) {
        Err(hk_core::Error::Unsupported { .. }) => return Ok(None),
        outputs => outputs.map_err(|e| Failure::new(format!("{} ({label}) on {device}: {e}", op.name)))?,
    };
    Ok(Some(stream.take_profiles()?))
}

/// One case on one target.
struct Facts {
    arch: Arch,
    floor: u64,
    sum: Counters,
    kernels: Vec<Profile>,
}

impl Facts {
    /// None for a case of other targets.
    fn count(op: &'static Operator, case: &Case, arch: Arch) -> Result<Option<Facts>> {
        Self::of_call(&op.example(case, 0)?, case.label, arch)
    }

    fn of_call(call: &HostCall, label: &str, arch: Arch) -> Result<Option<Facts>> {
        let Some(kernels) = profiles(call, label, &format!("emu:{arch}?details=true"))? else {
            return Ok(None);
        };
        let traffic = (call.operator().traffic)(call);
        let mut sum = Counters::default();
        kernels.iter().for_each(|kernel| sum += kernel.counters);
        Ok(Some(Facts { arch, floor: traffic.read + traffic.written, sum, kernels }))
    }

    /// The names of the kernels.
    fn kernel_names(&self) -> String {
        let names: Vec<String> = self.kernels.iter().map(|k| format!("`{}`", k.kernel)).collect();
        names.join(", ")
    }

    /// Of each kernel, those that are alike once.
    fn each(&self, value: fn(&Profile) -> u32) -> String {
        let mut values: Vec<String> = self.kernels.iter().map(|k| value(k).to_string()).collect();
        values.dedup();
        values.join(", ")
    }

    fn cells(&self) -> [String; COLUMNS.len() - 2] {
        let c = &self.sum;
        let d = c.details.unwrap_or_default();
        let moved = c.global_read_bytes + c.global_written_bytes;
        let clocks = Costs::of(self.arch).clocks(c);
        let matrix =
            if c.mfma == 0 { "-".into() } else { ratio(100 * clocks.matrix, clocks.busiest(), 0) + " %" };
        [
            ratio(d.distinct_read_bytes + d.distinct_written_bytes, self.floor, 2),
            format!("{} %", ratio(100 * d.wide_bytes, moved, 0)),
            c.waves.to_string(),
            ratio(c.valu, c.waves, 0),
            ratio(c.instructions, d.distinct_written_lines, 1),
            ratio(d.lines_in_flight, c.waves, 1),
            if c.mfma == 0 { "-".into() } else { ratio(d.drains, c.waves, 1) },
            ratio(d.lds_clocks, d.lds_clocks - d.lds_conflict_clocks, 2),
            matrix,
            self.each(|k| k.resources.vgprs + k.resources.agprs),
            self.each(|k| k.resources.waves_per_simd),
            self.each(|k| k.resources.scratch_bytes),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_names_its_command() {
        let text = document("hk-norm", "| a |");
        assert!(
            text.starts_with("<!-- Generated: cargo run")
                && text.contains("--family hk-norm --update docs/facts")
        );
        assert!(text.contains("# Counted facts of hk-norm\n") && text.ends_with("\n\n| a |\n"));
    }

    #[test]
    fn facts_are_those_of_the_launch() {
        let op = crate::operator("rmsnorm").unwrap();
        let facts = Facts::count(op, &op.cases[1], Arch::Gfx942).unwrap().unwrap();
        let cells = facts.cells();
        // 4096 rows of 128 bf16, read once and written once, and the weights.
        assert_eq!(cells[0], "1.00");
        assert_eq!(cells[1], "100 %");
        assert_eq!(facts.sum.waves.to_string(), cells[2]);
        assert!(facts.sum.waves <= 1024, "four rows a wave or more");
        assert_eq!(
            (&*cells[6], &*cells[7], &*cells[8], &*cells[11]),
            ("-", "-", "-", "0"),
            "no matrix unit, no LDS, no scratch"
        );
        let lines: f64 = cells[5].parse().unwrap();
        assert!(lines >= 16.0, "{lines} lines in flight");
    }
}
