//! Comparison of results with references.

use hk_core::registry::{Described, HostCall, HostTensor, HostTensorF64, Operator, Tolerance};
use hk_core::{DType, Element, Error, Float, Result, bf16, f16};
use std::fmt::{self, Write as _};

/// A tensor's elements on the host, row-major, with its shape and a name for reports.
#[derive(Debug, Clone, PartialEq)]
pub struct Array<T> {
    /// What it is and where it comes from: `bf16 on emu:gfx942`.
    pub label: String,
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// Elements.
    pub data: Vec<T>,
}

impl<T> Array<T> {
    /// An array of this shape.
    ///
    /// # Panics
    /// If `data` has another number of elements.
    pub fn new(label: impl Into<String>, shape: impl Into<Vec<usize>>, data: Vec<T>) -> Self {
        let shape = shape.into();
        assert_eq!(shape.iter().product::<usize>(), data.len(), "elements of shape {shape:?}");
        Self { label: label.into(), shape, data }
    }

    /// A row along the last axis, leading axes counted as one.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, i: usize) -> &[T] {
        let cols = self.shape.last().copied().unwrap_or(1);
        &self.data[i * cols..(i + 1) * cols]
    }
}

impl<T: Float> Array<T> {
    fn to_f64(&self) -> Vec<f64> {
        self.iter().map(|x| x.to_f64()).collect()
    }
}

impl<T> std::ops::Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data
    }
}

/// What a comparison found. Its `Display` is the report of a failure.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// What was compared.
    pub label: String,
    /// Element type of the result.
    pub dtype: DType,
    /// Shape of the result.
    pub shape: Vec<usize>,
    /// How far elements may be off.
    pub tolerance: Tolerance,
    /// Number of elements that the reference has: those that it leaves untouched are passed over.
    pub elements: usize,
    /// Number of elements that are too far off.
    pub bad: usize,
    /// Number of elements that equal the reference rounded once to the result's type.
    pub rounded: usize,
    /// The 2-norm of the errors relative to that of the reference, and what it may be, for tolerances that bound it.
    pub norm: Option<[f64; 2]>,
    /// The element that is furthest off, relative to its bound; `None` if there are no elements.
    pub worst: Option<Deviation>,
    /// The worst element and its neighbours along the last axis, if any element is bad.
    around: Vec<Deviation>,
}

/// An element and its reference.
#[derive(Debug, Clone, Copy)]
pub struct Deviation {
    /// Index in row-major order.
    pub index: usize,
    /// The result.
    pub got: f64,
    /// The reference.
    pub want: f64,
    /// `|got - want|`; 0 if both are NaN or the same infinity.
    pub error: f64,
    /// What the error may be.
    pub bound: f64,
    /// Whether it is within.
    pub ok: bool,
}

impl Deviation {
    /// Share of the bound: at most 1 if within, infinite for an error where there may be none.
    pub fn share(&self) -> f64 {
        match (self.ok, self.error == 0.0) {
            (true, true) => 0.0,
            (true, false) => self.error / self.bound,
            (false, _) if self.error.is_nan() || self.bound == 0.0 => f64::INFINITY,
            (false, _) => self.error / self.bound,
        }
    }
}

/// The nearest value that `dtype` has, to nearest even; types other than `f32`, `f16` and `bf16` are left alone, their
/// references are exact.
pub fn round_to(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => Float::to_f64(<f16 as Float>::from_f64(x)),
        DType::Bf16 => Float::to_f64(<bf16 as Float>::from_f64(x)),
        _ => x,
    }
}

/// The same bits, or both NaN.
fn is_same(got: f64, rounded: f64) -> bool {
    got.to_bits() == rounded.to_bits() || (got.is_nan() && rounded.is_nan())
}

fn deviation(
    dtype: DType,
    tolerance: Tolerance,
    index: usize,
    got: f64,
    want: f64,
    magnitude: f64,
) -> Deviation {
    if HostTensorF64::is_untouched(want) {
        return Deviation { index, got, want, error: 0.0, bound: 0.0, ok: true };
    }
    let rounded = round_to(dtype, want);
    let same = is_same(got, rounded);
    if tolerance == Tolerance::Exact {
        let error = if same { 0.0 } else { (got - rounded).abs() };
        return Deviation { index, got, want, error, bound: 0.0, ok: same };
    }
    let (rtol, atol) = tolerance.bounds(dtype);
    let rest = match tolerance {
        Tolerance::Sum { terms } => terms * magnitude + atol,
        // A magnitude of NaN is 1.
        Tolerance::Attention | Tolerance::AttentionFp8 => atol * magnitude.max(1.0),
        _ => atol,
    };
    let bound = if want.is_finite() { rtol * want.abs() + rest } else { 0.0 };
    // A result at the end of the range may round to infinity where the reference just does not.
    let reached = round_to(dtype, want + bound.copysign(want));
    if same || got == rounded || (got.is_infinite() && got == reached) {
        // An infinity stands for the nearest value beyond the range, a distance that cannot be told.
        let error = if got.is_finite() { (got - want).abs() } else { 0.0 };
        return Deviation { index, got, want, error, bound, ok: true };
    }
    let error = (got - want).abs();
    Deviation { index, got, want, error, bound, ok: error <= bound }
}

/// Compares a result of type `dtype` with its reference.
///
/// For [`Tolerance::Exact`] each element has the bits of the reference rounded once to `dtype`. Otherwise
/// `|got - want| <= rtol |want| + atol` with the class's bounds, for [`Tolerance::Sum`] with the error of the sum added, and for
/// attention with `atol` times a magnitude above 1;
/// NaN meets NaN, and infinity meets what rounds to the same infinity, or would with the bound added.
///
/// # Panics
/// If `got` and `want` have not as many elements as the shape of `want` says.
pub fn compare(
    label: impl Into<String>,
    dtype: DType,
    got: &[f64],
    want: &HostTensorF64,
    tolerance: Tolerance,
) -> Comparison {
    let label = label.into();
    let tolerance = want.tolerance.unwrap_or(tolerance);
    let HostTensorF64 { shape, values: want, magnitudes, .. } = want;
    let elements = shape.iter().product::<usize>();
    assert_eq!(got.len(), elements, "{label}: elements of the result");
    assert_eq!(want.len(), elements, "{label}: elements of the reference");
    assert!([0, elements].contains(&magnitudes.len()), "{label}: magnitudes of the reference");
    let default = |i: usize| if matches!(tolerance, Tolerance::Sum { .. }) { want[i] } else { 1.0 };
    let magnitude = |i: usize| magnitudes.get(i).copied().unwrap_or_else(|| default(i)).abs();
    let at = |i: usize| deviation(dtype, tolerance, i, got[i], want[i], magnitude(i));

    let (mut compared, mut bad, mut rounded, mut worst) = (0, 0, 0, None::<Deviation>);
    for i in 0..elements {
        let d = at(i);
        bad += usize::from(!d.ok);
        let untouched = HostTensorF64::is_untouched(want[i]);
        compared += usize::from(!untouched);
        rounded += usize::from(!untouched && is_same(got[i], round_to(dtype, want[i])));
        let further = |w: &Deviation| (!d.ok, d.share()) > (!w.ok, w.share());
        if worst.as_ref().is_none_or(further) {
            worst = Some(d);
        }
    }
    let norm = tolerance.norm(dtype).map(|most| [relative_norm(dtype, got, want, magnitudes), most]);
    let mut around = Vec::new();
    if let Some(w) = worst.filter(|_| bad > 0) {
        let cols = shape.last().copied().unwrap_or(1);
        let row = w.index / cols * cols;
        around.extend((w.index.saturating_sub(3).max(row)..(w.index + 4).min(row + cols)).map(at));
    }
    let shape = shape.to_vec();
    Comparison { label, dtype, shape, tolerance, elements: compared, bad, rounded, norm, worst, around }
}

/// The 2-norm of the errors relative to that of the reference, of elements that are finite in it, and neither zero nor subnormal. An element
/// of the reference counts as a sixteenth of its terms' magnitude at least: those of a small result may all cancel by chance.
fn relative_norm(dtype: DType, got: &[f64], want: &[f64], magnitudes: &[f64]) -> f64 {
    let least = if dtype == DType::F16 { f16::MIN_POSITIVE.to_f64() } else { f64::from(f32::MIN_POSITIVE) };
    let size = |i: usize| magnitudes.get(i).map_or(0.0, |m| m.abs() / 16.0).max(want[i].abs());
    let (mut error, mut all) = (0.0, 0.0);
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        if want.is_finite() && (got.abs() >= least || want.abs() >= least) {
            error += (got - want).powi(2);
            all += size(i).powi(2);
        }
    }
    if error == 0.0 { 0.0 } else { (error / all).sqrt() }
}

/// Compares each output of a call of an operator with the operator's reference, by the tolerance of its argument.
///
/// # Errors
/// What the reference answers; [`Error::Argument`] or [`Error::Shape`] if the reference and the outputs are not of the same
/// names and sizes.
pub fn compare_outputs(
    op: &Operator,
    call: &HostCall,
    outputs: &[(&'static str, HostTensor)],
) -> Result<Vec<Comparison>> {
    compare_with(op, &(op.reference)(call)?, outputs)
}

/// [`compare_outputs`] with the reference's answer at hand.
///
/// # Errors
/// [`Error::Argument`] or [`Error::Shape`] if the reference and the outputs are not of the same names and sizes.
pub(crate) fn compare_with(
    op: &Operator,
    reference: &[(&'static str, HostTensorF64)],
    outputs: &[(&'static str, HostTensor)],
) -> Result<Vec<Comparison>> {
    let compare_one = |(name, want): &(&'static str, HostTensorF64)| {
        let name = *name;
        let found = outputs.iter().find(|(n, _)| *n == name);
        let tolerance = op.arg(name).and_then(|arg| arg.role.output());
        let (Some((_, got)), Some(tolerance)) = (found, tolerance) else {
            return Err(Error::argument(op.name, name, "a tensor of the reference", "one of the outputs"));
        };
        let values = got.to_f64();
        if values.len() != want.values.len() {
            return Err(Error::shape(
                op.name,
                name,
                got.shape(),
                format!("{:?}, as the reference", want.shape),
            ));
        }
        Ok(compare(name, got.dtype(), &values, want, tolerance))
    };
    reference.iter().map(compare_one).collect()
}

impl Comparison {
    /// Whether every element is within its bound, and the norm of the errors.
    pub fn passed(&self) -> bool {
        self.bad == 0 && self.norm.is_none_or(|[got, most]| got <= most)
    }

    /// Share of elements that equal the correctly rounded reference; 1 if there are none.
    pub fn rounded_share(&self) -> f64 {
        if self.elements == 0 { 1.0 } else { self.rounded as f64 / self.elements as f64 }
    }

    /// # Panics
    /// With the report, if an element is out of bounds.
    #[track_caller]
    pub fn assert(&self) {
        assert!(self.passed(), "{self}");
    }

    fn coordinates(&self, index: usize) -> String {
        coordinates(&self.shape, index)
    }
}

/// The index of an element along each axis.
fn coordinates(shape: &[usize], mut index: usize) -> String {
    let mut at = vec![0; shape.len()];
    for (i, &n) in shape.iter().enumerate().rev() {
        (at[i], index) = (index % n, index / n);
    }
    format!("{at:?}")
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { label, dtype, shape, bad, elements, .. } = self;
        let (rtol, atol) = self.tolerance.bounds(*dtype);
        write!(f, "{label}: {bad} of {elements} elements of {shape:?} ")?;
        match self.tolerance {
            Tolerance::Exact => writeln!(f, "differ from the correctly rounded reference ({dtype})")?,
            Tolerance::Sum { terms } => writeln!(
                f,
                "are further than {rtol:e} |want| + {terms:e} magnitude + {atol:e} from the reference ({dtype})"
            )?,
            t @ (Tolerance::Attention | Tolerance::AttentionFp8) => writeln!(
                f,
                "are further than {rtol:e} |want| + {atol:e} max(magnitude, 1) from the reference ({dtype}, {t:?})"
            )?,
            t => writeln!(
                f,
                "are further than {rtol:e} |want| + {atol:e} from the reference ({dtype}, {t:?})"
            )?,
        }
        if let Some([got, most]) = self.norm.filter(|[got, most]| got > most) {
            writeln!(f, "the norm of the errors is {got:.3e} of the reference's, more than {most:e}")?;
        }
        let Some(worst) = self.worst else { return Ok(()) };
        write!(f, "worst element: {}, and its neighbours:", self.coordinates(worst.index))?;
        let one = [worst];
        for d in if self.around.is_empty() { &one[..] } else { &self.around } {
            let mark = if d.ok { ' ' } else { '!' };
            let at = self.coordinates(d.index);
            write!(f, "\n{mark} {at:<16} got {:<14} want {:<22}", Short(d.got), Short(d.want))?;
            write!(f, " error {:<10.3e} bound {:.3e}", d.error, d.bound)?;
        }
        Ok(())
    }
}

/// A number in the shorter of its two usual forms.
struct Short(f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = format!("{:?}", self.0);
        if text.len() > 22 {
            text.clear();
            write!(text, "{:.12e}", self.0)?;
        }
        f.pad(&text)
    }
}

/// Asserts that every element is as near to the reference as the tolerance class wants: [`compare()`].
///
/// # Panics
/// With a report of the worst element and its neighbours.
#[track_caller]
pub fn assert_close<T: Float>(got: &Array<T>, want: &[f64], tolerance: Tolerance) -> Comparison {
    assert_near(got, &HostTensorF64::new(&*got.shape, want.to_vec()), tolerance)
}

/// [`assert_close`] to a reference that knows the magnitudes of its sums, whose shape counts.
///
/// # Panics
/// As [`assert_close`].
#[track_caller]
pub fn assert_near<T: Float>(got: &Array<T>, want: &HostTensorF64, tolerance: Tolerance) -> Comparison {
    let result = compare(&*got.label, T::DTYPE, &got.to_f64(), want, tolerance);
    result.assert();
    result
}

/// Asserts that at least this share of the elements equals the reference rounded once to `T`: 0.99 is the extra-strict
/// lane beside [`assert_close`].
///
/// # Panics
/// If fewer do; names the first that does not.
#[track_caller]
pub fn assert_rounded<T: Float>(got: &Array<T>, want: &[f64], share: f64) {
    let want = HostTensorF64::new(&*got.shape, want.to_vec());
    let result = compare(&*got.label, T::DTYPE, &got.to_f64(), &want, Tolerance::Exact);
    let is = result.rounded_share();
    assert!(is >= share, "only {:.2} % of the elements are correctly rounded\n{result}", 100.0 * is);
}

/// Asserts that both have the same bits. For results that must not depend on something.
///
/// # Panics
/// If the lengths or any bits differ; names the first such element.
#[track_caller]
pub fn assert_bits<T: Element>(got: &Array<T>, want: &[T]) {
    first_mismatch(got, want, "has other bits", |a, b| bytemuck::bytes_of(a) == bytemuck::bytes_of(b));
}

/// Asserts that no element is more than `ulps` representable values away; NaN meets NaN.
///
/// # Panics
/// If one is; names the first.
#[track_caller]
pub fn assert_within_ulps<T: Float>(got: &Array<T>, want: &[T], ulps: u64) {
    let what = format!("is more than {ulps} ulp away");
    first_mismatch(got, want, &what, |&a, &b| ulp_distance(a, b) <= ulps);
}

#[track_caller]
fn first_mismatch<T: Element>(got: &Array<T>, want: &[T], what: &str, same: impl Fn(&T, &T) -> bool) {
    let label = &got.label;
    assert_eq!(got.len(), want.len(), "{label}: elements of both");
    let mut bad = (0..got.len()).filter(|&i| !same(&got[i], &want[i]));
    if let Some(i) = bad.next() {
        let (at, n, all) = (coordinates(&got.shape, i), bad.count() + 1, got.len());
        let (g, w) = (&got[i], &want[i]);
        panic!("{label}: {n} of {all} elements differ; the first, {at}, {what}: got {g:?}, want {w:?}");
    }
}

/// How many representable values lie from `a` to `b`: 0 if they are equal or both NaN, 1 for neighbours, `u64::MAX` if
/// one is NaN. Both zeros are the same value, and infinity is next to the largest finite one.
pub fn ulp_distance<T: Float>(a: T, b: T) -> u64 {
    fn place<T: Float>(x: T) -> i64 {
        let bytes = bytemuck::bytes_of(&x);
        let bits = bytes.iter().rev().fold(0, |bits, &b| bits << 8 | i64::from(b));
        let sign = 1 << (8 * bytes.len() - 1);
        if bits & sign == 0 { bits } else { -(bits ^ sign) }
    }
    match (a.to_f64().is_nan(), b.to_f64().is_nan()) {
        (true, true) => 0,
        (false, false) => place(a).abs_diff(place(b)),
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    const NAN: f64 = f64::NAN;
    const INF: f64 = f64::INFINITY;

    fn failure(f: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("the check passes");
        panic.downcast_ref::<String>().cloned().expect("a message")
    }

    fn ok<T: Float>(got: T, want: f64, tolerance: Tolerance) -> bool {
        compare("x", T::DTYPE, &[got.to_f64()], &HostTensorF64::new([1], vec![want]), tolerance).passed()
    }

    #[test]
    fn bounds_are_those_of_the_class() {
        for (tolerance, rtol, atol) in
            [(Tolerance::Elementwise, 8e-3, 1e-6), (Tolerance::Reduction, 8e-3, 1e-5)]
        {
            for want in [0.0, 1.0, -3.0, 1e-4] {
                let bound = rtol * f64::abs(want) + atol;
                let wanted = HostTensorF64::new([2], vec![want; 2]);
                let at =
                    |e: f64| compare("x", DType::Bf16, &[want + e, want - e], &wanted, tolerance).passed();
                assert!(at(0.999 * bound), "{want}");
                assert!(!at(1.001 * bound), "{want}");
            }
        }
    }

    #[test]
    fn sums_may_be_off_by_their_terms() {
        let terms = 2f64.powi(-10);
        let t = Tolerance::Sum { terms };
        let mut want = HostTensorF64::new([1], vec![1.0]);
        let passes = |want: &HostTensorF64, e: f64| {
            let results = [DType::F16, DType::F32].map(|dtype| {
                let half_step = t.bounds(dtype).0;
                compare("x", dtype, &[1.0 - half_step - e], want, t).passed()
            });
            assert_eq!(results[0], results[1]);
            results[0]
        };
        assert!(passes(&want, 0.999 * terms));
        assert!(!passes(&want, 1.001 * terms));
        want.magnitudes = vec![8.0];
        assert!(passes(&want, 7.99 * terms));
        assert!(!passes(&want, 8.01 * terms));
        let zero = HostTensorF64::new([1], vec![0.0]).with_magnitudes(vec![3.0]);
        assert!(compare("x", DType::Bf16, &[2.99 * terms], &zero, t).passed());
        let report = compare("x", DType::Bf16, &[3.01 * terms], &zero, t).to_string();
        assert!(
            report.contains(
                "1 of 1 elements of [1] are further than 3.90625e-3 |want| + 9.765625e-4 magnitude"
            ),
            "{report}"
        );
    }

    #[test]
    fn attention_is_bounded_by_the_magnitude_of_its_terms() {
        let t = Tolerance::Attention;
        let (rtol, atol) = t.bounds(DType::Bf16);
        // The norm of the errors is that of the other element.
        let passes = |magnitudes: &[f64], share: f64| {
            let want = HostTensorF64::new([2], vec![1.0, 1e6]).with_magnitudes(magnitudes.to_vec());
            compare("x", DType::Bf16, &[1.0 + rtol + share * atol, 1e6], &want, t).passed()
        };
        for (magnitudes, factor) in
            [(&[][..], 1.0), (&[0.25, 0.0], 1.0), (&[f64::NAN, 0.0], 1.0), (&[3.0, 0.0], 3.0)]
        {
            assert!(passes(magnitudes, 0.999 * factor), "{magnitudes:?}");
            assert!(!passes(magnitudes, 1.001 * factor), "{magnitudes:?}");
        }
    }

    #[test]
    fn norms_are_bounded_beside_elements() {
        let want = HostTensorF64::new([4], vec![1.0, -1.0, 1.0, f64::INFINITY]);
        let at = |e: f64| {
            let got = [1.0 + e, -1.0 - e, 1.0 + e, f64::INFINITY];
            compare("x", DType::Bf16, &got, &want, Tolerance::Attention)
        };
        assert!(at(4.99e-3).passed());
        let off = at(5.01e-3);
        assert!(!off.passed() && off.bad == 0);
        assert!(off.to_string().contains("the norm of the errors is 5.010e-3"), "{off}");
        // Terms that cancel: 8 is half of a sixteenth of 256.
        let want = HostTensorF64::new([2], vec![8.0, -8.0]);
        let passes = |magnitude: f64, error: f64| {
            let want = want.clone().with_magnitudes(vec![magnitude; 2]);
            compare("x", DType::Bf16, &[8.0 + error, -8.0 - error], &want, Tolerance::Attention).passed()
        };
        assert!(passes(256.0, 16.0 * 4.99e-3) && !passes(256.0, 16.0 * 5.01e-3));
        assert!(passes(64.0, 8.0 * 4.99e-3) && !passes(64.0, 8.0 * 5.01e-3));
        assert!(passes(f64::NAN, 8.0 * 4.99e-3) && !passes(f64::NAN, 8.0 * 5.01e-3));
    }

    #[test]
    fn exact_means_the_bits_of_the_rounded_reference() {
        let t = Tolerance::Exact;
        assert!(ok(bf16::from_f32(1.0), 1.0 + 1.0 / 256.0, t)); // a tie, to even
        assert!(!ok(bf16::from_f32(1.0078125), 1.0 + 1.0 / 256.0, t));
        assert!(ok(0.0f32, 0.0, t));
        assert!(!ok(-0.0f32, 0.0, t));
        assert!(ok(f16::INFINITY, 65520.0, t));
        assert!(!ok(f16::MAX, 65520.0, t));
        assert!(ok(f32::NAN, -NAN, t));
    }

    #[test]
    fn nan_and_infinity_meet_their_like_only() {
        for t in [Tolerance::Exact, Tolerance::Elementwise, Tolerance::Reduction] {
            assert!(ok(f32::NAN, NAN, t));
            assert!(!ok(f32::NAN, 1.0, t));
            assert!(!ok(1.0f32, NAN, t));
            assert!(!ok(f32::NAN, INF, t));
            assert!(ok(f32::INFINITY, INF, t));
            assert!(!ok(f32::NEG_INFINITY, INF, t));
            assert!(!ok(1.0f32, INF, t));
            assert!(!ok(f32::INFINITY, 1.0, t));
            assert!(ok(f32::INFINITY, 1e39, t));
            assert!(!ok(f32::NEG_INFINITY, 1e39, t));
        }
        // Within a step of the end of the range either is right, but for an exact result.
        assert!(ok(f16::INFINITY, 65500.0, Tolerance::Elementwise));
        assert!(ok(f16::MAX, 65530.0, Tolerance::Elementwise));
        assert!(!ok(f16::INFINITY, 65000.0, Tolerance::Elementwise));
        assert!(!ok(f16::INFINITY, -65500.0, Tolerance::Elementwise));
        assert!(!ok(f16::INFINITY, 65500.0, Tolerance::Exact));
    }

    #[test]
    fn the_report_names_the_worst_element_and_its_neighbours() {
        let mut data = vec![1.0f32; 2 * 3 * 8];
        data[3 * 8 + 8 + 2] = 1.5; // [1, 1, 2]
        data[3] = 1.001;
        let got = Array::new("y on a device", [2, 3, 8], data);
        let report = failure(|| {
            assert_close(&got, &[1.0; 48], Tolerance::Reduction);
        });
        assert!(
            report.starts_with("y on a device: 2 of 48 elements of [2, 3, 8] are further than"),
            "{report}"
        );
        assert!(report.contains("worst element: [1, 1, 2]"), "{report}");
        assert!(report.contains("! [1, 1, 2]        got 1.5            want 1.0"), "{report}");
        assert!(report.contains("error 5.000e-1   bound 1.100e-5"), "{report}");
        // The row's start limits the neighbours to the left.
        assert!(report.contains("\n  [1, 1, 0]") && report.contains("\n  [1, 1, 5]"), "{report}");
        assert_eq!(report.lines().count(), 2 + 6, "{report}");
    }

    #[test]
    fn a_nan_is_the_worst_of_all() {
        let got = Array::new("y", [3], vec![100.0f32, f32::NAN, 1.0]);
        let report = failure(|| {
            assert_close(&got, &[1.0; 3], Tolerance::Reduction);
        });
        assert!(report.contains("2 of 3") && report.contains("worst element: [1]"), "{report}");
    }

    #[test]
    fn empty_results_pass() {
        let c = assert_close(&Array::new("y", [0, 5], Vec::<bf16>::new()), &[], Tolerance::Exact);
        assert!(c.worst.is_none() && c.rounded_share() == 1.0);
    }

    #[test]
    fn untouched_elements_are_passed_over() {
        let want = HostTensorF64::new([3], vec![1.0, HostTensorF64::UNTOUCHED, f64::NAN]);
        for tolerance in [Tolerance::Exact, Tolerance::Reduction] {
            assert!(compare("y", DType::F32, &[1.0, 7.0, f64::NAN], &want, tolerance).passed());
            let one = compare("y", DType::F32, &[1.0, 7.0, 0.0], &want, tolerance);
            assert_eq!((one.elements, one.bad, one.rounded), (2, 1, 1));
        }
    }

    #[test]
    fn the_share_of_correctly_rounded_elements_counts() {
        let mut data = vec![bf16::ONE; 100];
        data[7] = bf16::from_f32(1.0078125);
        let got = Array::new("y", [100], data);
        assert_rounded(&got, &[1.0; 100], 0.99);
        let report = failure(|| assert_rounded(&got, &[1.0; 100], 0.995));
        assert!(report.starts_with("only 99.00 % of the elements are correctly rounded"), "{report}");
        assert!(report.contains("! [7]"), "{report}");
    }

    #[test]
    fn bits_differ_where_values_do_not() {
        let got = Array::new("y", [2, 2], vec![0.0f32, 1.0, f32::NAN, 2.0]);
        assert_bits(&got, &[0.0, 1.0, f32::NAN, 2.0]);
        let report = failure(|| assert_bits(&got, &[0.0, 1.0, f32::NAN, -2.0]));
        assert_eq!(
            report,
            "y: 1 of 4 elements differ; the first, [1, 1], has other bits: got 2.0, want -2.0"
        );
        failure(|| assert_bits(&got, &[-0.0, 1.0, f32::NAN, 2.0]));
    }

    #[test]
    fn ulps_count_representable_values() {
        let b = bf16::from_f32;
        assert_eq!(ulp_distance(b(1.0), b(1.0078125)), 1);
        assert_eq!(ulp_distance(b(0.0), b(-0.0)), 0);
        assert_eq!(ulp_distance(f32::from_bits(1), -f32::from_bits(2)), 3);
        assert_eq!(ulp_distance(f32::MAX, f32::INFINITY), 1);
        assert_eq!(ulp_distance(f16::MIN, f16::MAX), 2 * 0x7bff);
        assert_eq!(ulp_distance(f32::NAN, -f32::NAN), 0);
        assert_eq!(ulp_distance(f32::NAN, 1.0), u64::MAX);
        let got = Array::new("y", [1], vec![b(1.0078125)]);
        assert_within_ulps(&got, &[b(1.0)], 1);
        failure(|| assert_within_ulps(&got, &[b(1.0)], 0));
    }
}
