//! Sanitizers of order: races on LDS and global memory, barriers, deadlocks, streams.

mod barriers;
mod global;
mod lds;
mod streams;

use crate::common::{Rig, hip, options};
use hk_emu::{Check, Checks, Fault, Near, Site, Space};

/// The kernel of `source` on a machine with these checks.
fn watched(cpu: &str, checks: impl Into<Checks>, source: &str) -> Rig {
    Rig::new(options(cpu).sanitize(checks.into()), &hip(cpu, "-O3", source))
}

/// What a sanitizer reported.
struct Report {
    check: Check,
    what: String,
    site: Site,
    other: Option<Site>,
    lane: Option<u32>,
    address: Option<(Space, u64)>,
    near: Option<Near>,
}

#[track_caller]
fn report<T: std::fmt::Debug>(result: Result<T, Fault>) -> Report {
    let fault = result.expect_err("a report");
    println!("{fault}");
    let Fault::Sanitizer { site, check, what, lane, address, other, near } = fault else {
        panic!("another fault: {fault}")
    };
    Report { check, what, site: *site, other: other.map(|o| *o), lane, address, near: near.map(|n| *n) }
}

/// Asserts that a report names the line of the source that ends in the comment `mark`.
#[track_caller]
fn at_line(site: &Site, source: &str, mark: &str) {
    let n = source.lines().position(|l| l.ends_with(mark)).expect("the mark is there");
    let named = site.source.as_deref().unwrap_or("nothing");
    assert!(named.ends_with(&format!("kernel.hip:{}", n + 1)), "{named}, not {mark} in line {}", n + 1);
}

impl Report {
    /// Asserts which lines of the source it names: the later access and the earlier one.
    #[track_caller]
    fn lines(&self, source: &str, here: &str, there: &str) {
        at_line(&self.site, source, here);
        at_line(self.other.as_ref().expect("another side"), source, there);
    }
}
