//! `hk run --check` on damaged calls of every operator: an answer or an error, no panic, and no output file beside an error.

use clap::Parser as _;
use hk_core::registry::{Described as _, HostCall, HostTensor, Operator, TensorSpec};
use hk_core::{Arch, DType};
use proptest::prelude::*;
use proptest::sample::Index;
use safetensors::tensor::{Dtype, TensorView};
use std::fs;
use std::path::Path;

/// What is done to a good call.
#[derive(Debug, Clone)]
enum Damage {
    /// A tensor is left out.
    Drop(Index),
    /// An axis has another length.
    Resize(Index, Index, usize),
    /// Another element type.
    Retype(Index, Index),
    /// Axes are merged into one, or one of length 1 is added.
    Reshape(Index, bool),
    /// Some elements have the bits of these bytes.
    Overwrite(Index, [u8; 8], usize),
    /// A parameter is this text.
    Parameter(Index, Index),
    /// An optional output is asked for.
    Want(Index),
}

const TEXTS: [&str; 14] = [
    "-1",
    "0",
    "1",
    "7",
    "0.5",
    "1e300",
    "nan",
    "-inf",
    "4294967295",
    "1000000000000",
    "9223372036854775807",
    "18446744073709551615",
    "true",
    "",
];

/// Legal, and an output of 16 GiB.
const TOO_LARGE: [(&str, &str); 1] = [("pad_multiple", "4294967295")];

fn damage() -> impl Strategy<Value = Damage> {
    let any_index = any::<Index>;
    let bytes = prop_oneof![
        Just([0xff; 8]),
        Just([0; 8]),
        Just([0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff, 0x7f]),
        Just([0, 0, 0x80, 0x7f, 0, 0, 0x80, 0x7f]),
        Just([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]),
        any::<[u8; 8]>(),
    ];
    let length = prop_oneof![Just(0), Just(1), Just(2), 3usize..70, Just(129)];
    prop_oneof![
        any_index().prop_map(Damage::Drop),
        (any_index(), any_index(), length).prop_map(|(t, axis, n)| Damage::Resize(t, axis, n)),
        (any_index(), any_index()).prop_map(|(t, dtype)| Damage::Retype(t, dtype)),
        (any_index(), any::<bool>()).prop_map(|(t, merge)| Damage::Reshape(t, merge)),
        (any_index(), bytes, 1usize..5).prop_map(|(t, bytes, every)| Damage::Overwrite(t, bytes, every)),
        (any_index(), any_index()).prop_map(|(p, text)| Damage::Parameter(p, text)),
        any_index().prop_map(Damage::Want),
    ]
}

/// A call as files and options have it. A file holds tensors that the library does not, of more axes for instance.
struct Damaged {
    tensors: Vec<(&'static str, TensorSpec, Vec<u8>)>,
    options: Vec<String>,
}

impl Damaged {
    fn of(call: &HostCall) -> Self {
        let mut options: Vec<String> =
            call.scalars().map(|(name, value)| format!("--param={name}={value}")).collect();
        options.extend(call.wanted().iter().map(|name| format!("--want={name}")));
        Self {
            tensors: call.tensors().map(|(name, t)| (name, t.spec(), t.bytes().to_vec())).collect(),
            options,
        }
    }

    fn apply(&mut self, op: &'static Operator, damage: &Damage) {
        let n = self.tensors.len();
        let index = |t: &Index| if n == 0 { None } else { Some(t.index(n)) };
        match damage {
            Damage::Drop(t) => drop(index(t).map(|i| self.tensors.remove(i))),
            Damage::Resize(t, axis, length) => self.replace(index(t), |spec| {
                if !spec.shape.is_empty() {
                    let axis = axis.index(spec.shape.len());
                    spec.shape[axis] = *length;
                }
            }),
            Damage::Retype(t, dtype) => self.replace(index(t), |spec| spec.dtype = *dtype.get(&DType::ALL)),
            Damage::Reshape(t, merge) => self.replace(index(t), |spec| {
                let elements = spec.shape.iter().product();
                match merge {
                    true => spec.shape = vec![elements],
                    false => spec.shape.insert(0, 1),
                }
            }),
            Damage::Overwrite(t, bytes, every) => {
                let Some(i) = index(t) else { return };
                let (_, spec, data) = &mut self.tensors[i];
                let size = spec.dtype.size_bytes();
                data.chunks_mut(size).step_by(*every).for_each(|e| e.copy_from_slice(&bytes[8 - size..]));
            }
            Damage::Parameter(p, text) if !op.scalars.is_empty() => {
                let scalar = p.get(op.scalars);
                let texts = scalar.choices.iter().chain(&TEXTS);
                let texts: Vec<_> = texts.filter(|text| !TOO_LARGE.contains(&(scalar.name, text))).collect();
                self.options.retain(|o| !o.starts_with(&format!("--param={}=", scalar.name)));
                self.options.push(format!("--param={}={}", scalar.name, text.get(&texts)));
            }
            Damage::Want(a) => self.options.push(format!("--want={}", a.get(op.args).name)),
            Damage::Parameter(..) => {}
        }
    }

    /// Another type or shape, with example data.
    fn replace(&mut self, i: Option<usize>, change: impl FnOnce(&mut TensorSpec)) {
        let Some(i) = i else { return };
        let (_, spec, data) = &mut self.tensors[i];
        change(spec);
        let flat = TensorSpec::new(spec.dtype, [spec.shape.iter().product()]);
        let sample = hk_core::registry::Sample::Integers { low: 0, high: 4 };
        *data = HostTensor::sample(flat, sample, i as u64).unwrap().bytes().to_vec();
    }

    fn write(&self, path: &Path) {
        let views = self.tensors.iter().map(|(name, spec, data)| {
            let dtype = match spec.dtype {
                DType::Fp4x2 => Dtype::U8,
                DType::F32 => Dtype::F32,
                DType::F16 => Dtype::F16,
                DType::Bf16 => Dtype::BF16,
                DType::I8 => Dtype::I8,
                DType::I16 => Dtype::I16,
                DType::I32 => Dtype::I32,
                DType::I64 => Dtype::I64,
                DType::U8 => Dtype::U8,
                DType::U32 => Dtype::U32,
                DType::Fp8E4M3 => Dtype::F8_E4M3,
                DType::Fp8E5M2 => Dtype::F8_E5M2,
                DType::Fp8E4M3Fnuz => Dtype::F8_E4M3FNUZ,
                DType::Fp8E5M2Fnuz => Dtype::F8_E5M2FNUZ,
                DType::E8M0 => Dtype::F8_E8M0,
                other => panic!("{other} has no type in a file"),
            };
            (*name, TensorView::new(dtype, spec.shape.clone(), data).unwrap())
        });
        fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
    }
}

/// Elements of the largest tensor of a corner that is run: references of larger ones take seconds.
const LARGEST: usize = 1 << 17;

/// Runs a damaged call and gives the error, if there is one.
fn run(operator: &'static Operator, corner: usize, damages: &[Damage], arch: Arch) -> Option<String> {
    let small: Vec<_> = operator
        .corners
        .iter()
        .chain(operator.cases)
        .filter(|case| case.tensors.iter().all(|(_, _, shape)| shape.iter().product::<usize>() <= LARGEST))
        .collect();
    let case = small.get(corner % small.len().max(1))?;
    let mut damaged = Damaged::of(&operator.example(case, corner as u64).unwrap());
    damages.iter().for_each(|damage| damaged.apply(operator, damage));
    let dir = tempfile::tempdir().unwrap();
    let (input, output) = (dir.path().join("in"), dir.path().join("out"));
    damaged.write(&input);
    let mut args = vec!["hk".into(), "run".into(), operator.name.into(), "--check".into(), "--json".into()];
    args.extend([format!("--device=emu:{arch}"), format!("--in={}", input.display())]);
    args.push(format!("--out={}", output.display()));
    args.append(&mut damaged.options);
    let cli = match hk_cli::Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => return Some(error.to_string()),
    };
    hk_cli::discard_output();
    let error = cli.execute().err().map(|failure| failure.to_string());
    assert_eq!(output.exists(), error.is_none(), "{args:?}: {error:?}");
    if let Some(error) = &error {
        assert!(!error.trim().is_empty(), "{args:?}");
        assert!(!error.contains("reference cannot be computed"), "{args:?}: {error}");
    }
    error
}

/// As `PROPTEST_CASES` says, or some for each operator.
fn cases() -> u32 {
    let asked = std::env::var("PROPTEST_CASES").ok();
    asked.and_then(|n| n.parse().ok()).unwrap_or(10 * hk_cli::operators().len() as u32)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 200, cases: cases(), ..Default::default() })]

    #[test]
    fn a_damaged_call_is_an_answer_or_an_error(
        operator in any::<Index>(),
        corner in 0usize..64,
        damages in prop::collection::vec(damage(), 1..3),
        second in any::<bool>(),
    ) {
        let operators = hk_cli::operators();
        run(operators[operator.index(operators.len())], corner, &damages, Arch::AMD[usize::from(second)]);
    }
}

/// The damages find something to damage: without any, calls are right.
#[test]
fn calls_without_damage_are_right() {
    for operator in hk_cli::operators() {
        let errors: Vec<_> = Arch::AMD.iter().filter_map(|&arch| run(operator, 0, &[], arch)).collect();
        assert!(errors.len() < 2, "{}: {errors:?}", operator.name);
    }
}
