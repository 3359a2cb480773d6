//! What an operator is: its tensors, scalars, cases and functions.

use super::{
    BenchSizes, Call, CallSpec, Described, DeviceCall, HostCall, HostTensor, HostTensorF64, Named, POISON,
    Sample, TensorSpec, Tolerance, Traffic,
};
use crate::{CodeObjects, DType, DeviceInfo, Error, Result, Stream};
use std::fmt;

/// An operator of a family crate.
#[derive(Debug, Clone, Copy)]
pub struct Operator {
    /// Name, that of the safe function.
    pub name: &'static str,
    /// Crate, `hk-norm`.
    pub family: &'static str,
    /// The formula, in one line.
    pub summary: &'static str,
    /// Tensors in the order of the safe function.
    pub args: &'static [ArgSpec],
    /// Scalars and options.
    pub scalars: &'static [ScalarSpec],
    /// The compiled sources that it launches kernels from.
    pub kernels: &'static [&'static CodeObjects],
    /// Shapes of real models, what the demo and the benches run.
    pub cases: &'static [Case],
    /// Sizes that are measured on GPUs, beside the cases.
    pub bench: BenchSizes,
    /// Small sizes that between them launch every kernel: what sanitizers and mutants run on.
    pub corners: &'static [Case],
    /// The outputs for these inputs, in the order of `args`; checks what the inputs must have in common. Optional
    /// outputs are among them if the call asks for them ([`Call::wants`]).
    pub outputs: fn(&CallSpec) -> Result<Named<TensorSpec>>,
    /// Calls the safe function.
    pub run: fn(&Stream, &mut DeviceCall) -> Result<()>,
    /// The outputs again, in f64 and plain loops.
    pub reference: fn(&HostCall) -> Result<Named<HostTensorF64>>,
    /// Bytes that any implementation has to move.
    pub traffic: fn(&HostCall) -> Traffic,
}

impl Operator {
    /// The argument of that name.
    pub fn arg(&self, name: &str) -> Option<&'static ArgSpec> {
        self.args.iter().find(|a| a.name == name)
    }

    /// What one of its cases calls it with.
    ///
    /// # Errors
    /// As [`Call::set`], [`Call::want`] and [`Call::set_scalar`], if the case contradicts the operator.
    pub fn spec(&'static self, case: &Case) -> Result<CallSpec> {
        let tensors = case.tensors.iter().map(|&(name, dtype, shape)| (name, TensorSpec::new(dtype, shape)));
        self.spec_of(tensors, case.scalars)
    }

    /// A call with these tensors, of which outputs are asked for, and scalars.
    ///
    /// # Errors
    /// As [`spec`](Self::spec).
    pub(super) fn spec_of(
        &'static self,
        tensors: impl IntoIterator<Item = (&'static str, TensorSpec)>,
        scalars: &[(&'static str, Scalar)],
    ) -> Result<CallSpec> {
        let mut call = Call::new(self);
        for (name, tensor) in tensors {
            match self.arg(name) {
                Some(arg) if arg.role.is_input() => call.set(name, tensor)?,
                _ => call.want(name)?,
            }
        }
        for &(name, value) in scalars {
            call.set_scalar(name, value)?;
        }
        Ok(call)
    }

    /// One of its cases with example data, the same for the same seed.
    ///
    /// # Errors
    /// As [`spec`](Self::spec).
    pub fn example(&'static self, case: &Case, seed: u64) -> Result<HostCall> {
        self.spec(case)?.sample(seed)
    }

    /// Runs the operator: copies the inputs to the device, runs, copies the outputs back, those updated in place
    /// included, in the order of the arguments.
    ///
    /// # Errors
    /// As [`DeviceCall::prepare`], what the safe function answers, and failures of the device.
    pub fn execute(&self, stream: &Stream, call: &HostCall) -> Result<Named<HostTensor>> {
        self.execute_filled(stream, call, POISON)
    }

    /// As [`execute`](Self::execute); the bytes of the outputs are all `fill` before the run, so that a run over another fill
    /// shows what the operator does not write.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    pub fn execute_filled(&self, stream: &Stream, call: &HostCall, fill: u8) -> Result<Named<HostTensor>> {
        let mut device_call = DeviceCall::prepare_filled(stream, call, fill)?;
        (self.run)(stream, &mut device_call)?;
        device_call.outputs().map(|(name, tensor)| Ok((name, tensor.download(stream)?))).collect()
    }
}

/// One of the ways in which an operator can make what a call asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// What it is, by name; the same names for all of an operator.
    pub values: Vec<(&'static str, String)>,
    /// The one that it takes.
    pub chosen: bool,
}

/// The ways that a family's operators have, given the call and the device.
pub type Choices = fn(&CallSpec, &DeviceInfo) -> Result<Vec<Choice>>;

/// What an argument is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Role {
    /// Read.
    In,
    /// Written; how far it may be from the reference.
    Out(Tolerance),
    /// Read and written in place: comes as an input and is an output.
    InOut(Tolerance),
}

impl Role {
    /// Read: has to come with a call.
    pub const fn is_input(self) -> bool {
        !matches!(self, Self::Out(_))
    }

    /// Written, and how far it may be from the reference.
    pub const fn output(self) -> Option<Tolerance> {
        match self {
            Self::In => None,
            Self::Out(tolerance) | Self::InOut(tolerance) => Some(tolerance),
        }
    }
}

/// A tensor argument of an operator.
#[derive(Debug, Clone, Copy)]
pub struct ArgSpec {
    /// Name.
    pub name: &'static str,
    /// Read or written.
    pub role: Role,
    /// May be left out.
    pub optional: bool,
    /// Element types it can have. Which of them fit together is for `outputs` and the safe function to check.
    pub dtypes: &'static [DType],
    /// Fewest and most axes.
    pub rank: (usize, usize),
    /// What the axes mean: `[rows, cols]`.
    pub shape: &'static str,
    /// What example data for it looks like.
    pub sample: Sample,
}

impl ArgSpec {
    /// A tensor that is read, of normal example data, with `rank` axes or, by [`ranks`](Self::ranks), others.
    pub const fn input(
        name: &'static str,
        dtypes: &'static [DType],
        rank: usize,
        shape: &'static str,
    ) -> Self {
        let sample = Sample::Normal { mean: 0.0, deviation: 1.0 };
        Self { name, role: Role::In, optional: false, dtypes, rank: (rank, rank), shape, sample }
    }

    /// A tensor that is written.
    pub const fn output(
        name: &'static str,
        tolerance: Tolerance,
        dtypes: &'static [DType],
        rank: usize,
        shape: &'static str,
    ) -> Self {
        Self { role: Role::Out(tolerance), ..Self::input(name, dtypes, rank, shape) }
    }

    /// A tensor that is updated in place.
    pub const fn updated(
        name: &'static str,
        tolerance: Tolerance,
        dtypes: &'static [DType],
        rank: usize,
        shape: &'static str,
    ) -> Self {
        Self { role: Role::InOut(tolerance), ..Self::input(name, dtypes, rank, shape) }
    }

    /// It may be left out.
    pub const fn optional(self) -> Self {
        Self { optional: true, ..self }
    }

    /// With this example data.
    pub const fn sampled(self, sample: Sample) -> Self {
        Self { sample, ..self }
    }

    /// With at least `fewest` and at most `most` axes.
    pub const fn ranks(self, fewest: usize, most: usize) -> Self {
        Self { rank: (fewest, most), ..self }
    }

    /// Checks element type and number of axes.
    pub(super) fn check(&self, op: &'static str, tensor: &impl Described) -> Result<()> {
        if !self.dtypes.contains(&tensor.dtype()) {
            let names: Vec<_> = self.dtypes.iter().map(|d| d.name()).collect();
            return Err(Error::dtype(op, self.name, tensor.dtype(), names.join(", ")));
        }
        let (least, most) = self.rank;
        if !(least..=most).contains(&tensor.shape().len()) {
            let want = match (least, most) {
                (1, 1) => format!("1 axis: {}", self.shape),
                (least, most) if least == most => format!("{least} axes: {}", self.shape),
                (least, most) => format!("{least} to {most} axes: {}", self.shape),
            };
            return Err(Error::shape(op, self.name, tensor.shape(), want));
        }
        Ok(())
    }
}

/// A scalar argument or an option of an operator.
#[derive(Debug, Clone, Copy)]
pub struct ScalarSpec {
    /// Name.
    pub name: &'static str,
    /// Value if none is given; its kind is the scalar's kind.
    pub default: Scalar,
    /// The values of a [`Scalar::Choice`]; empty for other kinds.
    pub choices: &'static [&'static str],
    /// What it means.
    pub summary: &'static str,
}

impl ScalarSpec {
    /// The values it can have, in words.
    pub fn domain(&self) -> String {
        match self.default {
            Scalar::Float(_) => "a real number".into(),
            Scalar::Int(_) => "an integer".into(),
            Scalar::Count(_) => "an integer, 0 or more".into(),
            Scalar::Bool(_) => "true or false".into(),
            Scalar::Choice(_) => format!("one of {}", self.choices.join(", ")),
        }
    }
}

/// The value of a scalar.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    /// A real number.
    Float(f64),
    /// An integer.
    Int(i64),
    /// An integer that is not negative: a size, a number of things, a seed.
    Count(u64),
    /// A switch.
    Bool(bool),
    /// One of the names that the specification lists.
    Choice(&'static str),
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(x) => write!(f, "{x:?}"),
            Self::Int(x) => write!(f, "{x}"),
            Self::Count(x) => write!(f, "{x}"),
            Self::Bool(x) => write!(f, "{x}"),
            Self::Choice(x) => f.write_str(x),
        }
    }
}

/// Inputs and scalars at a size that a real model has.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Where the size comes from: `Llama-3 8B, 128 tokens`.
    pub label: &'static str,
    /// The inputs, and the optional outputs to ask for, with their shapes.
    pub tensors: &'static [(&'static str, DType, &'static [usize])],
    /// Scalars that differ from their default.
    pub scalars: &'static [(&'static str, Scalar)],
}

impl Case {
    /// Elements of its largest tensor.
    pub fn largest(&self) -> usize {
        self.tensors.iter().map(|(.., shape)| shape.iter().product()).max().unwrap_or(0)
    }
}
