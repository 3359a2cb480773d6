//! Tests of every operator of a registry.

use crate::compare::compare_with;
use crate::{Gpu, devices, sanitized_devices};
use hk_codeobj::CodeObject;
use hk_core::registry::Operator;
use hk_core::{Arch, Error};
use std::cell::OnceCell;
use std::collections::BTreeSet;

/// Runs the corner cases of an operator on both emulated targets with every sanitizer on, unless tests run on GPUs alone, and on
/// the GPUs that they run on, and compares the outputs with the reference.
///
/// # Panics
/// With the report of a sanitizer, or of a comparison that fails.
#[track_caller]
pub fn check_corners(operator: &'static Operator) {
    let emulated = |gpu: &Gpu| gpu.stream().device().info().driver == "emu";
    let (emulators, mut gpus): (Vec<_>, Vec<_>) = devices().into_iter().partition(emulated);
    if !emulators.is_empty() {
        gpus.extend(sanitized_devices());
    }
    let served = run_corners(operator, &gpus);
    let all = Arch::AMD.iter().all(|arch| gpus.iter().any(|gpu| gpu.arch() == *arch));
    for (i, case) in operator.corners.iter().enumerate() {
        let somewhere = served.contains(&i);
        assert!(somewhere || !all, "{}: no target serves corner {i} ({})", operator.name, case.label);
    }
}

/// Asserts that the corner cases of the operators launch every kernel of their sources, on both emulated targets.
///
/// # Panics
/// With the names of those that do not run, or as [`check_corners`].
#[track_caller]
pub fn assert_every_kernel_runs(operators: &'static [Operator]) {
    // Devices that no other test opens: only these calls load kernels.
    let gpus = Arch::AMD.map(|arch| Gpu::open(&format!("emu:{arch}?threads=2")));
    for operator in operators {
        run_corners(operator, &gpus);
    }
    for gpu in gpus {
        let arch = gpu.arch();
        let ran: BTreeSet<String> =
            gpu.stream().device().loaded_kernels().iter().map(|k| k.name().to_owned()).collect();
        let sources = operators.iter().flat_map(|operator| operator.kernels);
        let images = sources.map(|source| source.image(arch).unwrap_or_else(|e| panic!("{e}")));
        let compiled = images.map(|image| CodeObject::parse(image).unwrap_or_else(|e| panic!("{e}")));
        let all: BTreeSet<String> = compiled.flat_map(|c| c.kernels).map(|k| k.name).collect();
        let idle: Vec<_> = all.difference(&ran).collect();
        assert!(idle.is_empty(), "{arch}: no corner case launches {idle:?}");
    }
}

/// Asserts that lists of names ([`corners_of!`](crate::corners_of)) have every operator, once.
///
/// # Panics
/// With both lists.
#[track_caller]
pub fn assert_every_operator_is_checked(operators: &'static [Operator], checked: &[&[&str]]) {
    let mut checked = checked.concat();
    let mut names: Vec<_> = operators.iter().map(|operator| operator.name).collect();
    checked.sort_unstable();
    names.sort_unstable();
    assert_eq!(checked, names);
}

/// A test of the corner cases of each operator named ([`check_corners`]), and `CHECKED`, the names.
#[macro_export]
macro_rules! corners_of {
    ($operators:path: $($name:ident),+ $(,)?) => {
        /// The operators whose corner cases are tested here.
        pub(crate) const CHECKED: &[&str] = &[$(stringify!($name)),+];

        mod has_no_finding {
            $(
                #[test]
                fn $name() {
                    let named = $operators.iter().find(|operator| operator.name == stringify!($name));
                    $crate::check_corners(named.expect("an operator of that name"));
                }
            )+
        }
    };
}

/// The tests of the corner cases of a family: one for each operator ([`corners_of!`](crate::corners_of)), which have to be all, and
/// [`assert_every_kernel_runs`].
///
/// `hk_testkit::corner_tests!(hk_norm::OPERATORS: rmsnorm, layernorm);`
#[macro_export]
macro_rules! corner_tests {
    ($operators:path: $($name:ident),+ $(,)?) => {
        $crate::corners_of!($operators: $($name),+);

        #[test]
        fn every_operator_is_checked() {
            $crate::assert_every_operator_is_checked($operators, &[CHECKED]);
        }

        #[test]
        fn every_kernel_runs() {
            $crate::assert_every_kernel_runs($operators);
        }
    };
}

/// Gives the cases that a target serves.
#[track_caller]
fn run_corners(operator: &'static Operator, gpus: &[Gpu]) -> BTreeSet<usize> {
    let mut served = BTreeSet::new();
    for (i, case) in operator.corners.iter().enumerate() {
        let corner = format!("{}, corner {i} ({})", operator.name, case.label);
        let call = operator.example(case, i as u64).unwrap_or_else(|e| panic!("{corner}: {e}"));
        let reference = OnceCell::new();
        for gpu in gpus {
            let at = format!("{corner} on {}", gpu.spec());
            let outputs = match operator.execute(gpu.stream(), &call) {
                // A case for other targets. Their kernels are not among this one's, or another case launches them.
                Err(Error::Unsupported { .. }) => continue,
                outputs => outputs.unwrap_or_else(|e| panic!("{at}: {e}")),
            };
            let want = || (operator.reference)(&call).unwrap_or_else(|e| panic!("{at}: {e}"));
            let compared = compare_with(operator, reference.get_or_init(want), &outputs);
            let compared = compared.unwrap_or_else(|e| panic!("{at}: {e}"));
            compared.iter().for_each(|c| assert!(c.passed(), "{at}: {c}"));
            served.insert(i);
        }
    }
    served
}
