//! Fits the constants of hk-time to measured launches and prints the cross-validated error.
//!
//! `fit-timing --objects DIR [--rows FILE] [--folds K] [--iterations N] [--cases FILE] [--update]`: `DIR` holds code
//! objects as `<co_rev>/<co_path>` (`validation/extract.py` makes it). `--cases` writes each launch with its held-out
//! prediction, `--update` writes `data/fitted.csv`, `data/errors.csv` and
//! `docs/timing.svg`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use hk_time::constants::{Values, fitted_csv};
use hk_time::cu::UNITS;
use hk_time::error::errors_csv;
use hk_time::fit::{Case, Slopes, Validation, cases, errors, fit, folds, validate};
use hk_time::rows::Rows;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("fit-timing: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let (mut objects, mut rows, mut listed) = (None, data.join("calibration.csv"), None);
    let (mut k, mut iterations, mut update) = (5, 12, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        if arg == "--update" {
            update = true;
            continue;
        }
        let value = args.next().ok_or(format!("{arg}: a value is missing"))?;
        let number = || value.parse::<usize>().map_err(|_| format!("{arg}: `{value}` is no number"));
        match arg.as_str() {
            "--objects" => objects = Some(PathBuf::from(value)),
            "--rows" => rows = PathBuf::from(value),
            "--cases" => listed = Some(PathBuf::from(value)),
            "--folds" => k = number()?.max(2),
            "--iterations" => iterations = number()?,
            _ => {
                return Err(format!(
                    "{arg}: expected --objects, --rows, --cases, --folds, --iterations or --update"
                ));
            }
        }
    }
    let objects = objects.ok_or("--objects: the directory of code objects is missing")?;
    let text = std::fs::read_to_string(&rows).map_err(|e| format!("{}: {e}", rows.display()))?;
    let start = Instant::now();
    let (cases, left) = cases(&Rows::parse(&text)?, &objects);
    eprintln!("{} launches traced in {:.0} s", cases.len(), start.elapsed().as_secs_f64());
    let mut reasons = std::collections::BTreeMap::<String, Vec<String>>::new();
    left.into_iter().for_each(|(id, why)| reasons.entry(why).or_default().push(id));
    for (why, ids) in reasons {
        eprintln!("left out: {} ({}): {why}", ids.len(), ids.join(" "));
    }
    if cases.is_empty() {
        return Err("no row can be modelled".to_owned());
    }

    let folds = folds(&cases, k);
    let unfitted: Vec<_> = cases.iter().map(|c| (c.predict(&Values::start()).us, c.measured)).collect();
    let [median, high] = errors(&unfitted);
    eprintln!("before the fit: median {:.1} %, 90th percentile {:.1} %", 100.0 * median, 100.0 * high);
    if let Some(path) = &listed {
        list(path, &cases, &Values::start(), &folds, None)?;
    }
    let slopes = Slopes::new(&cases);
    let all: Vec<usize> = (0..cases.len()).collect();
    let values = fit(&cases, &all, &slopes, iterations);
    let pairs: Vec<_> = cases.iter().map(|c| (c.predict(&values).us, c.measured)).collect();
    let [median, high] = errors(&pairs);
    println!(
        "Fitted to all of them: median {:.1} %, 90th percentile {:.1} %.\n",
        100.0 * median,
        100.0 * high
    );
    println!("{}", fitted_csv(&values));
    if let Some(path) = &listed {
        list(path, &cases, &values, &folds, None)?;
    }
    if update {
        let path = data.join("fitted.csv");
        std::fs::write(&path, fitted_csv(&values)).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let validation = validate(&cases, &folds, &slopes, iterations, |fold| {
        eprintln!("fold {} of {k}, {:.0} s", fold + 1, start.elapsed().as_secs_f64());
    });
    println!("Held-out error, median / 90th percentile in %, {k} folds by code object:\n");
    println!("{}", validation.table(&cases));
    if update {
        let path = data.join("../../../docs/timing.svg");
        std::fs::write(&path, validation.figure(&cases)).map_err(|e| format!("{}: {e}", path.display()))?;
        let path = data.join("errors.csv");
        std::fs::write(&path, errors_csv(&validation.errors(&cases)))
            .map_err(|e| format!("{}: {e}", path.display()))?;
    }
    let [pairs, right] = validation.ranking(&cases);
    println!("Pairs of one shape that differ by more than 10 %: {pairs}, ranked right: {right}.");
    if let Some(path) = &listed {
        list(path, &cases, &values, &folds, Some(&validation))?;
    }
    eprintln!("{:.0} s in all", start.elapsed().as_secs_f64());
    Ok(())
}

/// Writes each launch with its times, held out where there is a validation.
fn list(
    path: &Path,
    cases: &[Case],
    values: &Values,
    folds: &[usize],
    held_out: Option<&Validation>,
) -> Result<(), String> {
    let mut text = "id,fold,measured_us,held_out_us,us,bound,mhz".to_owned();
    UNITS.iter().for_each(|unit| text += &format!(",{unit}"));
    text.push('\n');
    for (i, case) in cases.iter().enumerate() {
        let p = case.predict(values);
        let held = held_out.map_or(String::new(), |v| format!("{:.3}", v.predicted[i][0]));
        let id = case.row.get("id");
        text += &format!("{id},{},{},{held},{:.3},{},{:.0}", folds[i], case.measured, p.us, p.bound, p.mhz);
        p.busy.iter().for_each(|share| text += &format!(",{share:.3}"));
        text.push('\n');
    }
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}
