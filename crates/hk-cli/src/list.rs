//! `hk list`.

use crate::out::{self, Table};
use crate::{Failure, Result};
use hk_core::registry::{ArgSpec, Operator, Role, Scalar, ScalarSpec};
use hk_core::{Arch, DType};
use serde::Serialize;

/// Options of `hk list`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only one family, such as `norm`.
    #[arg(long)]
    family: Option<String>,
    /// Print everything as JSON.
    #[arg(long)]
    json: bool,
    /// Print `docs/operators.md`: tensors, element types and parameters, too.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

#[derive(Serialize)]
struct OperatorJson {
    name: &'static str,
    family: &'static str,
    summary: &'static str,
    tensors: Vec<TensorJson>,
    parameters: Vec<ParameterJson>,
    /// Targets that all of its kernels are compiled for.
    targets: Vec<&'static str>,
    cases: Vec<&'static str>,
}

#[derive(Serialize)]
struct TensorJson {
    name: &'static str,
    role: &'static str,
    optional: bool,
    dtypes: Vec<&'static str>,
    shape: &'static str,
    min_rank: usize,
    max_rank: usize,
}

#[derive(Serialize)]
struct ParameterJson {
    name: &'static str,
    default: String,
    values: String,
    summary: &'static str,
}

pub fn run(args: &Args) -> Result<()> {
    let operators = chosen(args.family.as_deref())?;
    if args.json {
        return out::json(&operators.iter().map(|op| json(op)).collect::<Vec<_>>());
    }
    if args.markdown {
        return out::print(markdown(&operators).trim_end());
    }
    let mut table = Table::new(["operator", "crate", "formula"]);
    for op in operators {
        table.row([op.name.into(), op.family.into(), op.summary.into()]);
    }
    table.wrapped(WIDTH).print()?;
    out::print("\nhk inspect OP: its tensors, parameters and kernels.")
}

/// Columns of a terminal.
const WIDTH: u16 = 120;

/// The operators of a family, named with or without `hk-`, or all of them.
pub fn chosen(family: Option<&str>) -> Result<Vec<&'static Operator>> {
    let all = crate::operators();
    let Some(family) = family else { return Ok(all) };
    let is = |op: &&&Operator| op.family == family || op.family.strip_prefix("hk-") == Some(family);
    let chosen: Vec<_> = all.iter().filter(is).copied().collect();
    if chosen.is_empty() {
        let mut names: Vec<_> = all.iter().map(|op| op.family).collect();
        names.dedup();
        return Err(Failure::new(format!("no family `{family}`, expected one of {}", names.join(", "))));
    }
    Ok(chosen)
}

/// `docs/operators.md`: the operators by crate, each with its formula, tensors, element types and parameters.
pub fn markdown(operators: &[&Operator]) -> String {
    let mut text = format!(
        "<!-- Generated: cargo run -p hk-cli -- list --markdown > docs/operators.md. A test compares. -->\n\n\
         # Operators\n\n\
         {} operators. Optional tensors are in brackets; a tensor on both sides of the arrow is updated in place. The \
         element\ntypes are those of the first tensor. `hk inspect OP` prints the rest: shapes, types and meaning of each \
         argument, and\nwhat the kernels need on each target.\n",
        operators.len()
    );
    for family in operators.chunk_by(|a, b| a.family == b.family) {
        let mut table = Table::new(["operator", "formula", "tensors", "element types", "parameters"]);
        for op in family {
            let types = op.args.first().map_or(&[][..], |a| a.dtypes);
            let code =
                |text: String| if text.is_empty() { text } else { format!("`{text}`").replace('|', "\\|") };
            table.row([
                code(op.name.into()),
                code(op.summary.into()),
                code(tensors(op)),
                dtypes(types),
                code(parameters(op)),
            ]);
        }
        let name = family.first().map_or("", |op| op.family);
        text += &format!("\n## {name}\n\n{table}\n");
    }
    text
}

/// `x, weight -> y, [rstd]`: optional ones in brackets, those updated in place on both sides.
fn tensors(op: &Operator) -> String {
    let side = |here: fn(Role) -> bool| {
        let name = |a: &ArgSpec| if a.optional { format!("[{}]", a.name) } else { a.name.to_owned() };
        op.args.iter().filter(|a| here(a.role)).map(name).collect::<Vec<_>>().join(", ")
    };
    format!("{} -> {}", side(Role::is_input), side(|r| r.output().is_some()))
}

/// `eps=1e-6, round_mode=f32`
fn parameters(op: &Operator) -> String {
    let parameter = |s: &ScalarSpec| format!("{}={}", s.name, s.default);
    op.scalars.iter().map(parameter).collect::<Vec<_>>().join(", ")
}

/// The word for a role.
pub fn role(role: Role) -> &'static str {
    match role {
        Role::In => "in",
        Role::Out(_) => "out",
        Role::InOut(_) => "in, out",
    }
}

/// `bf16, f16`
pub fn dtypes(list: &[DType]) -> String {
    list.iter().map(|d| d.name()).collect::<Vec<_>>().join(", ")
}

/// The values of a parameter, in words.
pub fn values(scalar: &ScalarSpec) -> String {
    match scalar.default {
        Scalar::Choice(_) => scalar.choices.join(", "),
        _ => scalar.domain(),
    }
}

/// Targets that all of an operator's sources are compiled for.
pub fn targets(op: &Operator) -> Vec<&'static str> {
    let compiled = |arch: &Arch| op.kernels.iter().all(|k| k.images().iter().any(|(a, _)| a == arch));
    Arch::ALL.iter().filter(|a| !op.kernels.is_empty() && compiled(a)).map(|a| a.name()).collect()
}

fn json(op: &Operator) -> OperatorJson {
    let tensor = |a: &ArgSpec| TensorJson {
        name: a.name,
        role: match a.role {
            Role::In => "in",
            Role::Out(_) => "out",
            Role::InOut(_) => "inout",
        },
        optional: a.optional,
        dtypes: a.dtypes.iter().map(|d| d.name()).collect(),
        shape: a.shape,
        min_rank: a.rank.0,
        max_rank: a.rank.1,
    };
    let parameter = |s: &ScalarSpec| ParameterJson {
        name: s.name,
        default: s.default.to_string(),
        values: values(s),
        summary: s.summary,
    };
    OperatorJson {
        name: op.name,
        family: op.family,
        summary: op.summary,
        tensors: op.args.iter().map(tensor).collect(),
        parameters: op.scalars.iter().map(parameter).collect(),
        targets: targets(op),
        cases: op.cases.iter().map(|c| c.label).collect(),
    }
}
