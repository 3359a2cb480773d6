//! Files of rows: what is wrong with one is said, and the others are modelled.

use std::path::Path;

use hk_time::predict::predict;
use hk_time::rows::{COLUMNS, Rows};

const CALIBRATION: &str = include_str!("../data/calibration.csv");

#[test]
fn the_calibration_has_the_columns_that_rows_need() {
    let rows = Rows::parse(CALIBRATION).expect("the file is well-formed");
    assert_eq!(rows.rows.len(), 256);
    for row in &rows.rows {
        assert!(row.number::<f64>("measured_us").is_ok_and(|us| us > 0.0), "{}", row.get("id"));
        assert!(row.number::<u32>("N").is_ok_and(|n| n > 0), "{}", row.get("id"));
    }
}

#[test]
fn missing_columns_are_named() {
    let error = Rows::parse("id,gpu,M\nA,MI325X,1\n").map(|_| ()).expect_err("columns are missing");
    assert!(
        error.starts_with("missing columns: co_path, co_rev") && error.contains("kernarg_bytes"),
        "{error}"
    );
}

/// The first row of the calibration with fields replaced.
fn changed(changes: &[(&str, &str)]) -> Rows {
    let mut rows = Rows::parse(CALIBRATION).expect("the file is well-formed");
    rows.rows.truncate(1);
    let mut out = csv::Writer::from_writer(vec![]);
    out.write_record(&rows.columns).expect("writes");
    let field = |c: &String| {
        let changed = changes.iter().find(|(name, _)| name == c).map(|(_, value)| *value);
        changed.unwrap_or_else(|| rows.rows[0].get(c)).to_owned()
    };
    out.write_record(rows.columns.iter().map(field)).expect("writes");
    let text = String::from_utf8(out.into_inner().expect("flushes")).expect("text");
    Rows::parse(&text).expect("well-formed")
}

#[test]
fn a_row_that_cannot_be_modelled_says_why_and_has_no_time() {
    let dir = tempfile::tempdir().expect("a directory");
    for (changes, want) in [
        (&[("gpu", "MI250X")][..], "gpu: no part `MI250X`, expected one of mi300x"),
        (&[("co_path", "../../etc/passwd")], "co_path: `../../etc/passwd`"),
        (&[("co_path", "/etc/passwd")], "co_path: `/etc/passwd`"),
        (&[("co_rev", "0123456789ab")], "No such file"),
    ] {
        let (csv, failed) = predict(&changed(changes), dir.path(), false).expect("writes");
        assert_eq!(failed, 1);
        let text = String::from_utf8(csv).expect("text");
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        let names = reader.headers().expect("a header").clone();
        let record = reader.records().next().expect("a row").expect("well-formed");
        let get = |name: &str| &record[names.iter().position(|n| n == name).expect("the column")];
        assert_eq!((get("predicted_us"), get("bound"), get("id")), ("", "", "C001"));
        assert!(get("note").contains(want), "{}", get("note"));
        assert_eq!(get("measured_us"), "6.0838", "other columns are passed through");
    }
    assert_eq!(COLUMNS.len(), 15);
}

#[test]
fn a_damaged_object_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let rows = changed(&[]);
    let row = &rows.rows[0];
    let path = dir.path().join(row.get("co_rev")).join(row.get("co_path"));
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).expect("creates");
    std::fs::write(&path, b"\x7fELF no code object").expect("writes");
    assert!(row.trace(dir.path(), false).is_err());
}
