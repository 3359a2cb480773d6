//! Modelled times of a file of rows.

use std::path::Path;

use rayon::prelude::*;

use crate::constants::Values;
use crate::error::measured;
use crate::rows::{Row, Rows};

/// Columns that are added to those of the rows.
pub const ADDED: [&str; 3] = ["predicted_us", "bound", "note"];

/// The rows with [`ADDED`] as CSV, and how many have no modelled time.
///
/// A row that cannot be modelled has an empty `predicted_us` and the reason in `note`.
///
/// # Errors
/// Of the CSV writer.
pub fn predict(rows: &Rows, objects: &Path, exact: bool) -> Result<(Vec<u8>, usize), csv::Error> {
    let added: Vec<Result<[String; 3], String>> =
        rows.rows.par_iter().map(|row| one(row, objects, exact)).collect();
    let mut out = csv::Writer::from_writer(vec![]);
    let kept: Vec<&String> = rows.columns.iter().filter(|c| !ADDED.contains(&c.as_str())).collect();
    out.write_record(kept.iter().map(|c| c.as_str()).chain(ADDED))?;
    let mut failed = 0;
    for (row, added) in rows.rows.iter().zip(added) {
        let added = added.unwrap_or_else(|why| {
            failed += 1;
            [String::new(), String::new(), why]
        });
        out.write_record(kept.iter().map(|c| row.get(c)).chain(added.iter().map(String::as_str)))?;
    }
    let bytes = out.into_inner().map_err(|e| csv::Error::from(std::io::Error::other(e.to_string())))?;
    Ok((bytes, failed))
}

fn one(row: &Row, objects: &Path, exact: bool) -> Result<[String; 3], String> {
    let traced = row.trace(objects, exact)?;
    let prediction = traced.time(Values::fitted());
    let mut note = format!("{} workgroups replayed; {}", traced.sampled, traced.part().error());
    if !measured(row.get("family")) {
        note += ", none of this family";
    }
    Ok([format!("{:.3}", prediction.us), prediction.bound.to_owned(), note])
}
