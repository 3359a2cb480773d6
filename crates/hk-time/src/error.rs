//! The error of the model on launches that its constants were not fitted to: what is printed with every figure.

use std::fmt;

use crate::parts::Part;

/// Of some launches, |modelled / measured - 1|.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Error {
    /// Launches.
    pub launches: usize,
    /// Median.
    pub median: f64,
    /// 90th percentile.
    pub high: f64,
    /// There were launches of the part itself.
    pub validated: bool,
}

const ERRORS: &str = include_str!("../data/errors.csv");

fn of(name: &str) -> Option<Error> {
    let line = ERRORS.lines().skip(1).find(|line| line.split(',').next() == Some(name))?;
    let mut numbers = line.split(',').skip(1);
    let mut next = || numbers.next()?.parse::<f64>().ok();
    Some(Error { launches: next()? as usize, median: next()?, high: next()?, validated: true })
}

/// Whether launches of a family of rows were among them.
pub fn measured(family: &str) -> bool {
    of(family).is_some()
}

impl Part {
    /// The held-out error on the launches of this part; of a part without any, that of all parts.
    pub fn error(&self) -> Error {
        let none = Error { launches: 0, median: 0.0, high: 0.0, validated: false };
        let own = if self.validated { of(self.name) } else { None };
        own.unwrap_or_else(|| Error { validated: false, ..of("all").unwrap_or(none) })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Error { launches, median, high, validated } = self;
        let (median, high) = (100.0 * median, 100.0 * high);
        if *validated {
            write!(f, "modelled, error {median:.1} % (90th percentile {high:.1} %) on {launches} launches")
        } else {
            write!(
                f,
                "modelled, part not validated; error {median:.1} % (90th percentile {high:.1} %) on {launches} launches of other parts"
            )
        }
    }
}

/// The text of `data/errors.csv`.
pub fn errors_csv(errors: &[(String, Error)]) -> String {
    let row = |(name, e): &(String, Error)| format!("{name},{},{:.4},{:.4}\n", e.launches, e.median, e.high);
    std::iter::once("launches,n,median,p90\n".to_owned()).chain(errors.iter().map(row)).collect()
}
