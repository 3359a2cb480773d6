//! Laws of every operator.

use hk_core::registry::{ArgSpec, Call, HostCall, HostTensor, Named, Operator, Scalar};
use hk_core::{Arch, Device, Error, Stream};
use std::collections::BTreeSet;

/// Elements of the largest tensor of a call that is run many times.
const LARGEST: usize = 1 << 15;

/// The corner cases and the others, the smallest first.
fn calls(operator: &'static Operator) -> Vec<(usize, HostCall)> {
    let mut cases: Vec<_> = operator.corners.iter().chain(operator.cases).map(|c| (c.largest(), c)).collect();
    cases.sort_by_key(|(size, _)| *size);
    // Larger ones, but for a few, only where those before do not give something.
    let most = cases.iter().filter(|(size, _)| *size <= LARGEST).count().max(4) + 12;
    let mut given = BTreeSet::new();
    let mut number = 0;
    cases.retain(|(_, case)| {
        number += 1;
        let new = case.tensors.iter().filter(|(name, ..)| given.insert(*name)).count();
        number <= most || new > 0
    });
    cases.into_iter().map(|(size, case)| (size, operator.example(case, 1).unwrap())).collect()
}

fn streams() -> Vec<Stream> {
    Arch::AMD.map(|arch| Device::open(&format!("emu:{arch}")).unwrap().create_stream().unwrap()).into()
}

type Answer = Result<Named<HostTensor>, Error>;

fn answer(stream: &Stream, call: &HostCall) -> Answer {
    call.operator().execute(stream, call)
}

/// A call with one input replaced or removed.
fn with_input(call: &HostCall, name: &str, tensor: Option<HostTensor>) -> HostCall {
    let mut new = Call::new(call.operator());
    for (other, t) in call.tensors().filter(|(n, _)| *n != name) {
        new.set(other, t.clone()).unwrap();
    }
    if let Some(tensor) = tensor {
        new.set(name, tensor).unwrap();
    }
    call.scalars().for_each(|(name, value)| new.set_scalar(name, value).unwrap());
    call.wanted().iter().for_each(|name| new.want(name).unwrap());
    new
}

/// The call as it is, with each name of a choice, with each switch turned, and without each other optional input.
fn neighbours(call: &HostCall, keep: &str) -> Vec<(String, HostCall)> {
    let op = call.operator();
    let copy = || with_input(call, "", None);
    let mut all = vec![("as it is".to_owned(), copy())];
    for scalar in op.scalars.iter().filter(|s| s.name != keep) {
        let values: Vec<Scalar> = match scalar.default {
            Scalar::Choice(_) => scalar.choices.iter().map(|c| Scalar::Choice(c)).collect(),
            Scalar::Bool(_) => vec![Scalar::Bool(false), Scalar::Bool(true)],
            _ => vec![],
        };
        for value in values.into_iter().filter(|v| call.scalar(scalar.name).as_ref() != Ok(v)) {
            let mut new = copy();
            new.set_scalar(scalar.name, value).unwrap();
            all.push((format!("{}={value}", scalar.name), new));
        }
    }
    for arg in op.args.iter().filter(|a| a.optional && a.role.is_input() && a.name != keep) {
        if call.optional(arg.name).is_some() {
            all.push((format!("without {}", arg.name), with_input(call, arg.name, None)));
        }
    }
    all
}

/// Other values of the same type and shape: other samples, and the elements in reverse.
fn others(arg: &ArgSpec, tensor: &HostTensor) -> Vec<HostTensor> {
    use hk_core::registry::Described as _;
    let sample = |seed| HostTensor::sample(tensor.spec(), arg.sample, seed).unwrap();
    let size = tensor.dtype().size_bytes();
    let reverse: Vec<u8> = tensor.bytes().chunks(size).rev().flatten().copied().collect();
    let mut all: Vec<_> = (100..104).map(sample).collect();
    all.push(HostTensor::from_bytes(tensor.spec(), reverse).unwrap());
    all.push(HostTensor::from_bytes(tensor.spec(), vec![0; tensor.bytes().len()]).unwrap());
    all.retain(|t| t != tensor);
    all
}

/// What the operator drops, on the first target that serves the call.
fn findings(operator: &'static Operator) -> BTreeSet<String> {
    let streams = streams();
    let mut dropped = BTreeSet::new();
    let calls = calls(operator);
    for arg in operator.args.iter().filter(|a| a.optional && a.role.is_input()) {
        let with: Vec<_> = calls.iter().filter(|(_, call)| call.optional(arg.name).is_some()).collect();
        // The smallest, and the last of the small ones, of another type or options.
        let last = with.iter().rev().find(|(size, _)| *size <= LARGEST);
        if with.is_empty() {
            dropped.insert(format!("{}: {} (in no case)", operator.name, arg.name));
        }
        for (_, call) in with.first().into_iter().chain(last) {
            let Some(tensor) = call.optional(arg.name) else { continue };
            for (how, near) in neighbours(call, arg.name) {
                let served = streams.iter().find_map(|s| Some((s, answer(s, &near).ok()?)));
                let Some((stream, outputs)) = served else { continue };
                if outputs.iter().all(|(_, t)| t.bytes().is_empty()) {
                    continue;
                }
                let same = |t: HostTensor| {
                    answer(stream, &with_input(&near, arg.name, Some(t))).is_ok_and(|o| o == outputs)
                };
                if others(arg, tensor).into_iter().all(same) {
                    dropped.insert(format!("{}: {} ({how})", operator.name, arg.name));
                }
            }
        }
    }
    dropped
}

/// An optional input that is given changes the outputs, or the call is refused: in corner cases, and in their neighbours by a
/// choice, a switch or another optional input.
#[test]
fn inputs_that_are_given_are_used_or_refused() {
    let dropped: BTreeSet<String> = hk_cli::operators().into_iter().flat_map(findings).collect();
    assert!(dropped.is_empty(), "given and not used: {dropped:#?}");
}

/// Values of a parameter that differ from `current`.
fn values(scalar: &hk_core::registry::ScalarSpec, current: Scalar) -> Vec<Scalar> {
    match current {
        Scalar::Float(x) => [x + 1.5, -1.0, 0.5 * x + 0.125, f64::NAN].map(Scalar::Float).into(),
        Scalar::Int(x) => [x.wrapping_add(1), 0, 1, -7, 3, 1 << 40].map(Scalar::Int).into(),
        Scalar::Count(x) => [x.wrapping_add(1), 0, 1, 3, 1 << 40].map(Scalar::Count).into(),
        Scalar::Bool(x) => vec![Scalar::Bool(!x)],
        Scalar::Choice(x) => scalar.choices.iter().filter(|c| **c != x).map(|c| Scalar::Choice(c)).collect(),
    }
}

/// Parameters that promise something about the bits of other calls, or say how the same bits are computed, and need not change those of this call.
const PROMISES: [&str; 3] = ["batch_invariant", "schedule", "dq_sums"];
/// The same of one operator: of others the parameter has an effect.
const KEEPS_BITS: [(&str, &str); 1] = [("sage_attention", "tile")];

/// Every parameter has a corner case in which another value changes the outputs or is refused.
#[test]
fn parameters_are_used_or_refused() {
    let mut dropped = vec![];
    for operator in hk_cli::operators() {
        let streams = streams();
        let calls = calls(operator);
        let mut answers: Vec<Option<Vec<Answer>>> = calls.iter().map(|_| None).collect();
        let keeps_bits = |name| PROMISES.contains(&name) || KEEPS_BITS.contains(&(operator.name, name));
        for scalar in operator.scalars.iter().filter(|s| !keeps_bits(s.name)) {
            let used = calls.iter().zip(&mut answers).any(|((_, call), before)| {
                let before = before.get_or_insert_with(|| streams.iter().map(|s| answer(s, call)).collect());
                values(scalar, call.scalar(scalar.name).unwrap()).into_iter().any(|value| {
                    let mut call = with_input(call, "", None);
                    call.set_scalar(scalar.name, value).unwrap();
                    streams.iter().zip(&*before).any(|(s, before)| answer(s, &call) != *before)
                })
            });
            if !used {
                dropped.push(format!("{}: {}", operator.name, scalar.name));
            }
        }
    }
    assert!(dropped.is_empty(), "never used: {dropped:#?}");
}
