//! Comparisons and classes: the lane mask, and for `v_cmpx` EXEC.

use std::cmp::Ordering;

use hk_emu::isa::{ALL_OPS, Encoding, Op};

use crate::semantics::exact::{DOUBLE, HALF, SINGLE};
use crate::semantics::float::{class, waves_of};
use crate::semantics::integer::waves32;
use crate::semantics::vector::{Body, Lane, Model, Ty, check_all, model};

fn order(l: &Lane, ty: Ty) -> Option<Ordering> {
    match ty.format() {
        Some(f) => {
            let x = |i: usize| f.value(l.mode.input(f, l.w(i)));
            x(0).compare(&x(1))
        }
        None => Some(ty.integer(l.x[0]).cmp(&ty.integer(l.x[1]))),
    }
}

/// A model of each condition for one type; which orders make it true.
macro_rules! conditions {
    ($ty:expr, $condition:expr; $($name:literal $ordering:pat $(if $guard:expr)?),* $(,)?) => {
        match $condition {
            $($name => {
                const T: Ty = $ty;
                Some(Body::Compare(|l| matches!(order(l, T), $ordering $(if $guard)?)))
            })*
            _ => None,
        }
    };
}

macro_rules! types {
    ($condition:expr, $name:expr; $($text:literal $ty:expr),*) => {
        match $name {
            $($text => {
                use Ordering::{Equal, Greater, Less};
                let body = conditions!($ty, $condition;
                    "F" Some(_) if false,
                    "LT" Some(Less),
                    "EQ" Some(Equal),
                    "LE" Some(Less | Equal),
                    "GT" Some(Greater),
                    "LG" Some(Less | Greater),
                    "NE" Some(Less | Greater),
                    "GE" Some(Greater | Equal),
                    "O" Some(_),
                    "U" None,
                    "NGE" None | Some(Less),
                    "NLG" None | Some(Equal),
                    "NGT" None | Some(Less | Equal),
                    "NLE" None | Some(Greater),
                    "NEQ" None | Some(Less | Greater),
                    "NLT" None | Some(Greater | Equal),
                    "TRU" _,
                    "T" _,
                );
                body.map(|body| ($ty, body))
            })*
            _ => None,
        }
    };
}

/// The model of a comparison, from its name.
fn comparison(op: Op) -> Option<Model> {
    let name = op.info().name;
    let rest = name.strip_prefix("V_CMPX_").or(name.strip_prefix("V_CMP_"))?;
    let (condition, ty) = rest.split_once('_')?;
    if condition == "CLASS" {
        let (ty, body) = match ty {
            "F16" => (Ty::F16, Body::Compare(|l| class(HALF, l.w(0)) & l.u(1) != 0)),
            "F32" => (Ty::F32, Body::Compare(|l| class(SINGLE, l.w(0)) & l.u(1) != 0)),
            _ => (Ty::F64, Body::Compare(|l| class(DOUBLE, l.w(0)) & l.u(1) != 0)),
        };
        return Some(model(op, Ty::Void, &[ty, Ty::B32], body));
    }
    let (ty, body) = types!(condition, ty;
        "F16" Ty::F16, "F32" Ty::F32, "F64" Ty::F64, "I16" Ty::I16, "U16" Ty::U16, "I32" Ty::I32, "U32" Ty::U32,
        "I64" Ty::I64, "U64" Ty::U64)?;
    Some(model(op, Ty::Void, &[ty, ty], body))
}

pub fn models(suffix: &str) -> Vec<Model> {
    let vopc = |op: &&Op| op.info().encoding == Encoding::Vopc && op.info().name.ends_with(suffix);
    ALL_OPS.iter().filter(vopc).filter_map(|op| comparison(*op)).collect()
}

#[test]
fn floats() {
    for (suffix, f) in [("_F16", HALF), ("_F32", SINGLE), ("_F64", DOUBLE)] {
        check_all(&models(suffix), &waves_of(f, 64), 1);
    }
}

#[test]
fn integers() {
    for suffix in ["_I16", "_U16", "_I32", "_U32", "_I64", "_U64"] {
        check_all(&models(suffix), &waves32(32), 1);
    }
}
