//! Which checks a launch runs under.

use std::fmt;
use std::ops::{BitAnd, BitOr};
use std::str::FromStr;

/// A sanitizer: a kind of mistake that an observed launch reports.
///
/// Accesses that are out of bounds, late or misaligned are faults of every launch and need no check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Check {
    /// A value that was never written decides something: an address, a branch, the lanes that run, a stored result.
    Uninit,
    /// Two waves of a workgroup access the same byte of LDS, one of them writes, and no barrier (with the waits it
    /// needs) lies between.
    Lds,
    /// Two waves access the same byte of global memory, one of them writes, and nothing orders them: no barrier
    /// within the workgroup, no release and acquire of sufficient scope between workgroups.
    Global,
    /// A register is used before an `s_waitcnt` has proven that the memory instruction that owns it is complete.
    Waits,
    /// A dependency that needs wait states (`s_nop`) which are not there.
    Hazards,
    /// A barrier that not every lane or not every wave of the workgroup reaches, or waves that wait for each other.
    Barriers,
    /// Launches or copies on different streams that access the same bytes, with no event between.
    Streams,
}

impl Check {
    /// Every check.
    pub const ALL: [Check; 7] = [
        Check::Uninit,
        Check::Lds,
        Check::Global,
        Check::Waits,
        Check::Hazards,
        Check::Barriers,
        Check::Streams,
    ];

    /// Its name in `HK_SANITIZE` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Check::Uninit => "uninit",
            Check::Lds => "lds",
            Check::Global => "global",
            Check::Waits => "waits",
            Check::Hazards => "hazards",
            Check::Barriers => "barriers",
            Check::Streams => "streams",
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of checks. Parses from names separated by commas: `all`, `none`, `lds,waits`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Checks(u8);

impl Checks {
    /// No check.
    pub const NONE: Checks = Checks(0);

    /// Every check.
    pub fn all() -> Checks {
        Check::ALL.into_iter().fold(Checks::NONE, |set, check| set | check)
    }

    /// Whether `check` is in the set.
    pub fn has(self, check: Check) -> bool {
        self.0 >> check as u8 & 1 != 0
    }

    /// Whether no check is.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl From<Check> for Checks {
    fn from(check: Check) -> Checks {
        Checks(1 << check as u8)
    }
}

impl<T: Into<Checks>> BitOr<T> for Checks {
    type Output = Checks;
    fn bitor(self, other: T) -> Checks {
        Checks(self.0 | other.into().0)
    }
}

impl BitAnd for Checks {
    type Output = Checks;
    fn bitand(self, other: Checks) -> Checks {
        Checks(self.0 & other.0)
    }
}

impl fmt::Display for Checks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        let names = Check::ALL.into_iter().filter(|check| self.has(*check)).map(Check::name);
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

impl fmt::Debug for Checks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checks({self})")
    }
}

/// A name that is no check.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown check {name:?}: expected all, none, or some of {}", Checks::all())]
pub struct UnknownCheck {
    /// The name given.
    pub name: String,
}

impl FromStr for Checks {
    type Err = UnknownCheck;

    fn from_str(text: &str) -> Result<Checks, UnknownCheck> {
        let mut set = Checks::NONE;
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            set = match name {
                "all" => set | Checks::all(),
                "none" => set,
                name => match Check::ALL.into_iter().find(|check| check.name() == name) {
                    Some(check) => set | check,
                    None => return Err(UnknownCheck { name: name.to_owned() }),
                },
            };
        }
        Ok(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_print_as_they_parse() {
        assert_eq!("all".parse(), Ok(Checks::all()));
        assert_eq!("".parse(), Ok(Checks::NONE));
        let some: Checks = "waits, lds".parse().expect("two checks");
        assert!(some.has(Check::Lds) && some.has(Check::Waits) && !some.has(Check::Uninit));
        assert_eq!(some.to_string(), "lds,waits");
        assert_eq!(some & Checks::from(Check::Lds), Check::Lds.into());
        assert_eq!(some.to_string().parse(), Ok(some));
        assert_eq!("lds,race".parse::<Checks>(), Err(UnknownCheck { name: "race".to_owned() }));
    }
}
