//! A call of an operator: its named tensors, its scalars, and the optional outputs that it asks for.

use super::{ArgSpec, Described, HostTensor, Named, Operator, Sample, Scalar, ScalarSpec, TensorSpec};
use crate::{Error, Result};

/// The named inputs of one call of an operator, its scalars, and which optional outputs it asks for.
#[derive(Debug)]
pub struct Call<V> {
    pub(super) op: &'static Operator,
    pub(super) tensors: Named<V>,
    pub(super) scalars: Named<Scalar>,
    pub(super) wanted: Vec<&'static str>,
    /// Operations that the reference may take.
    pub(super) reference_limit: u64,
}

/// A call with the types and shapes of its inputs only.
pub type CallSpec = Call<TensorSpec>;

/// A call with its inputs on the host.
pub type HostCall = Call<HostTensor>;

impl CallSpec {
    /// The call with example data, the same for the same seed.
    ///
    /// # Errors
    /// As [`TensorSpec::bytes`].
    pub fn sample(&self, seed: u64) -> Result<HostCall> {
        let mut tensors = Vec::with_capacity(self.tensors.len());
        for (i, (name, spec)) in self.tensors.iter().enumerate() {
            let sample = self.op.arg(name).map_or(Sample::Normal { mean: 0.0, deviation: 1.0 }, |a| a.sample);
            let sample = sample.resolved(|name| self.optional(name).map(Described::shape));
            let seed = seed.wrapping_add((i as u64) << 32);
            let tensor = HostTensor::sample(spec.clone(), sample, seed);
            tensors.push((*name, tensor.map_err(|e| e.of_argument(self.op.name, name))?));
        }
        Ok(Call {
            op: self.op,
            tensors,
            scalars: self.scalars.clone(),
            wanted: self.wanted.clone(),
            reference_limit: self.reference_limit,
        })
    }
}

impl<V: Described> Call<V> {
    /// Without inputs, every scalar at its default.
    pub fn new(op: &'static Operator) -> Self {
        let scalars = op.scalars.iter().map(|s| (s.name, s.default)).collect();
        Self { op, tensors: Vec::new(), scalars, wanted: Vec::new(), reference_limit: u64::MAX }
    }

    /// The operator.
    pub fn operator(&self) -> &'static Operator {
        self.op
    }

    /// Gives the input `name`, replacing an earlier one.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such input, [`Error::DType`] or [`Error::Shape`] if its element
    /// type or number of axes is not served.
    pub fn set(&mut self, name: &str, tensor: V) -> Result<()> {
        let op = self.op.name;
        let is_input = |a: &&ArgSpec| a.name == name && a.role.is_input();
        let Some(arg) = self.op.args.iter().find(is_input) else {
            let inputs = self.op.args.iter().filter(|a| a.role.is_input()).map(|a| a.name);
            let want = one_of("the operator has no inputs", inputs);
            return Err(Error::argument(op, "input", format!("`{name}`"), want));
        };
        arg.check(op, &tensor)?;
        self.tensors.retain(|(n, _)| *n != arg.name);
        self.tensors.push((arg.name, tensor));
        Ok(())
    }

    /// Asks for the optional output `name`.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such optional output.
    pub fn want(&mut self, name: &str) -> Result<()> {
        let is_optional = |a: &&ArgSpec| a.name == name && !a.role.is_input() && a.optional;
        let Some(arg) = self.op.args.iter().find(is_optional) else {
            let want = "an optional output of the operator";
            return Err(Error::argument(self.op.name, "output", format!("`{name}`"), want));
        };
        if !self.wants(name) {
            self.wanted.push(arg.name);
        }
        Ok(())
    }

    /// Sets a scalar.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such scalar, or the value is of another kind or a negative count.
    pub fn set_scalar(&mut self, name: &str, value: Scalar) -> Result<()> {
        let spec = self.scalar_spec(name)?;
        let wrong = || Error::argument(self.op.name, spec.name, value, spec.domain());
        let value = match (spec.default, value) {
            (Scalar::Count(_), Scalar::Int(n)) => Scalar::Count(u64::try_from(n).map_err(|_| wrong())?),
            _ => value,
        };
        let same_kind = std::mem::discriminant(&spec.default) == std::mem::discriminant(&value);
        let listed = !matches!(value, Scalar::Choice(c) if !spec.choices.contains(&c));
        if !same_kind || !listed {
            return Err(wrong());
        }
        self.scalars.retain(|(n, _)| *n != spec.name);
        self.scalars.push((spec.name, value));
        Ok(())
    }

    /// Sets a scalar from text, as it comes on a command line.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such scalar or the text is no value of its kind.
    pub fn parse_scalar(&mut self, name: &str, text: &str) -> Result<()> {
        let spec = self.scalar_spec(name)?;
        let value = match spec.default {
            Scalar::Float(_) => text.parse().ok().map(Scalar::Float),
            Scalar::Int(_) => text.parse().ok().map(Scalar::Int),
            Scalar::Count(_) => text.parse().ok().map(Scalar::Count),
            Scalar::Bool(_) => text.parse().ok().map(Scalar::Bool),
            Scalar::Choice(_) => spec.choices.iter().find(|c| **c == text).map(|c| Scalar::Choice(c)),
        };
        let wrong = || Error::argument(self.op.name, spec.name, format!("`{text}`"), spec.domain());
        self.set_scalar(name, value.ok_or_else(wrong)?)
    }

    /// Checks that every input that is not optional is there.
    ///
    /// # Errors
    /// [`Error::Argument`], naming the missing one.
    pub fn check_complete(&self) -> Result<()> {
        let needed = self.op.args.iter().filter(|a| a.role.is_input() && !a.optional);
        for arg in needed {
            self.get(arg.name)?;
        }
        Ok(())
    }

    /// The types and shapes of the inputs, and everything else.
    pub fn spec(&self) -> CallSpec {
        Call {
            op: self.op,
            tensors: self.tensors.iter().map(|(n, t)| (*n, t.spec())).collect(),
            scalars: self.scalars.clone(),
            wanted: self.wanted.clone(),
            reference_limit: self.reference_limit,
        }
    }

    /// Lets the reference leave out results if all of them take more than about so many multiplications and additions:
    /// [`HostTensorF64::UNTOUCHED`](super::HostTensorF64::UNTOUCHED) stands for them. References that are not long have all results,
    /// whatever the limit.
    pub fn limit_reference(&mut self, operations: u64) {
        self.reference_limit = operations;
    }

    /// What [`limit_reference`](Self::limit_reference) says; else there is no limit.
    pub fn reference_limit(&self) -> u64 {
        self.reference_limit
    }

    /// The scalars, with their names.
    pub fn scalars(&self) -> impl Iterator<Item = (&'static str, Scalar)> {
        self.scalars.iter().copied()
    }

    /// The optional outputs that it asks for.
    pub fn wanted(&self) -> &[&'static str] {
        &self.wanted
    }

    /// The inputs, with their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &V)> {
        self.tensors.iter().map(|(n, t)| (*n, t))
    }

    /// An input.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is missing.
    pub fn get(&self, name: &'static str) -> Result<&V> {
        self.optional(name).ok_or_else(|| Error::argument(self.op.name, name, "no tensor", "a tensor"))
    }

    /// An input that may be missing.
    pub fn optional(&self, name: &str) -> Option<&V> {
        self.tensors.iter().find(|(n, _)| *n == name).map(|(_, t)| t)
    }

    /// True if the call asks for this optional output.
    pub fn wants(&self, name: &str) -> bool {
        self.wanted.contains(&name)
    }

    /// A scalar.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such scalar.
    pub fn scalar(&self, name: &str) -> Result<Scalar> {
        let spec = self.scalar_spec(name)?;
        Ok(self.scalars.iter().find(|(n, _)| *n == spec.name).map_or(spec.default, |(_, s)| *s))
    }

    /// A scalar that is a real number.
    ///
    /// # Errors
    /// [`Error::Argument`] if the operator has no such scalar or it is of another kind.
    pub fn float(&self, name: &str) -> Result<f64> {
        match self.scalar(name)? {
            Scalar::Float(x) => Ok(x),
            other => Err(self.wrong_kind(other, "a real number")),
        }
    }

    /// A scalar that is an integer or a count.
    ///
    /// # Errors
    /// As [`float`](Self::float); [`Error::Argument`] for a count from 2^63.
    pub fn int(&self, name: &str) -> Result<i64> {
        match self.scalar(name)? {
            Scalar::Int(x) => Ok(x),
            Scalar::Count(x) => {
                let name = self.scalar_spec(name)?.name;
                i64::try_from(x).map_err(|_| Error::argument(self.op.name, name, x, "less than 2^63"))
            }
            other => Err(self.wrong_kind(other, "an integer")),
        }
    }

    /// A scalar that is a count.
    ///
    /// # Errors
    /// As [`float`](Self::float).
    pub fn count(&self, name: &str) -> Result<u64> {
        match self.scalar(name)? {
            Scalar::Count(x) => Ok(x),
            other => Err(self.wrong_kind(other, "a count")),
        }
    }

    /// A count as a size. Sizes are less than 2^32.
    ///
    /// # Errors
    /// As [`count`](Self::count); [`Error::Argument`] for larger ones.
    pub fn size(&self, name: &str) -> Result<usize> {
        let count = self.count(name)?;
        let name = self.scalar_spec(name)?.name;
        let too_large = || Error::argument(self.op.name, name, count, "a size, less than 2^32");
        u32::try_from(count).map(|n| n as usize).map_err(|_| too_large())
    }

    /// A scalar that is a switch.
    ///
    /// # Errors
    /// As [`float`](Self::float).
    pub fn bool(&self, name: &str) -> Result<bool> {
        match self.scalar(name)? {
            Scalar::Bool(x) => Ok(x),
            other => Err(self.wrong_kind(other, "true or false")),
        }
    }

    /// A scalar that is one of several names.
    ///
    /// # Errors
    /// As [`float`](Self::float).
    pub fn choice(&self, name: &str) -> Result<&'static str> {
        match self.scalar(name)? {
            Scalar::Choice(x) => Ok(x),
            other => Err(self.wrong_kind(other, "a name")),
        }
    }

    fn wrong_kind(&self, got: Scalar, want: &str) -> Error {
        Error::argument(self.op.name, "scalar", got, want)
    }

    fn scalar_spec(&self, name: &str) -> Result<&'static ScalarSpec> {
        self.op.scalars.iter().find(|s| s.name == name).ok_or_else(|| {
            let want = one_of("the operator has no parameters", self.op.scalars.iter().map(|s| s.name));
            Error::argument(self.op.name, "scalar", format!("`{name}`"), want)
        })
    }
}

/// `one of a, b`, or what there is to say where there are none.
fn one_of<'a>(none: &str, names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.collect();
    if names.is_empty() { format!("none: {none}") } else { format!("one of {}", names.join(", ")) }
}
