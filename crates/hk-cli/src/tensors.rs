//! Tensors in safetensors files.

use crate::{Failure, Result};
use hk_core::DType;
use hk_core::registry::{Described as _, HostTensor, Operator, TensorSpec};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// The element types that travel, in both directions.
const DTYPES: [(Dtype, DType); 14] = [
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::Bf16),
    (Dtype::I8, DType::I8),
    (Dtype::I16, DType::I16),
    (Dtype::I32, DType::I32),
    (Dtype::I64, DType::I64),
    (Dtype::U8, DType::U8),
    (Dtype::U32, DType::U32),
    (Dtype::F8_E4M3, DType::Fp8E4M3),
    (Dtype::F8_E5M2, DType::Fp8E5M2),
    (Dtype::F8_E4M3FNUZ, DType::Fp8E4M3Fnuz),
    (Dtype::F8_E5M2FNUZ, DType::Fp8E5M2Fnuz),
    (Dtype::F8_E8M0, DType::E8M0),
];

/// Reads every tensor of a file, as inputs of `op`. Packed fp4 and e8m0 come as U8, too, fp4 also as F4, whose shape counts
/// single values; BOOL stands for U8, and a tensor without axes for one of one element.
///
/// # Errors
/// If the file cannot be read, is not safetensors, or has a tensor of a type that no operator uses.
pub fn read(path: &Path, op: &Operator) -> Result<Vec<(String, HostTensor)>> {
    let bytes = fs::read(path).map_err(|e| Failure::file(path, e))?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|e| Failure::file(path, format_args!("not a safetensors file: {e}")))?;
    let mut tensors = Vec::with_capacity(file.len());
    for (name, view) in file.iter() {
        let tensor = host_tensor(op, name, &view).map_err(|e| Failure::file(path, e))?;
        tensors.push((name.to_owned(), tensor));
    }
    // The file keeps them in no order; messages come in one.
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(tensors)
}

fn host_tensor(op: &Operator, name: &str, view: &TensorView) -> Result<HostTensor> {
    if let (Dtype::F4, [axes @ .., last]) = (view.dtype(), view.shape())
        && last.is_multiple_of(2)
    {
        let spec = TensorSpec::new(DType::Fp4x2, [axes, &[last / 2]].concat());
        return Ok(HostTensor::from_bytes(spec, view.data().to_vec())?);
    }
    let wanted = op.arg(name).map_or(&[][..], |a| a.dtypes);
    let bytes = if view.dtype() == Dtype::BOOL && wanted.contains(&DType::U8) {
        Some((Dtype::BOOL, DType::U8))
    } else {
        None
    };
    let Some((_, dtype)) = bytes.or_else(|| DTYPES.into_iter().find(|(d, _)| *d == view.dtype())) else {
        let known: Vec<_> = DTYPES.iter().map(|(d, _)| d.to_string()).collect();
        let got = view.dtype();
        return Err(Failure::new(format!(
            "tensor `{name}`: dtype {got}, expected one of {}",
            known.join(", ")
        )));
    };
    // What has no type in PyTorch travels as bytes.
    let meant = [DType::Fp4x2, DType::E8M0].into_iter().find(|d| wanted.contains(d));
    let dtype = match meant {
        Some(meant) if dtype == DType::U8 && !wanted.contains(&DType::U8) => meant,
        _ => dtype,
    };
    // A scalar is a tensor of one element.
    let scalar = view.shape().is_empty() && op.arg(name).is_some_and(|a| a.rank.0 == 1);
    let shape = if scalar { &[1][..] } else { view.shape() };
    Ok(HostTensor::from_bytes(TensorSpec::new(dtype, shape), view.data().to_vec())?)
}

/// Writes tensors to a file.
///
/// # Errors
/// If the file cannot be written.
pub fn write(path: &Path, tensors: &[(&'static str, HostTensor)], about: &[(&str, &str)]) -> Result<()> {
    let mut views = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let wanted = match tensor.dtype() {
            DType::Fp4x2 => DType::U8,
            other => other,
        };
        let Some(&(dtype, _)) = DTYPES.iter().find(|(_, d)| *d == wanted) else {
            return Err(Failure::new(format!("output `{name}`: {wanted} has no safetensors type")));
        };
        let view = TensorView::new(dtype, tensor.shape().to_vec(), tensor.bytes());
        views.push((*name, view.map_err(|e| Failure::file(path, e))?));
    }
    let about: HashMap<String, String> = about.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    let bytes = safetensors::serialize(views, Some(about)).map_err(|e| Failure::file(path, e))?;
    fs::write(path, bytes).map_err(|e| Failure::file(path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_both_sides_have_the_same_size_and_are_there_once() {
        for (file, ours) in DTYPES {
            assert_eq!(file.bitsize(), 8 * ours.size_bytes(), "{file}");
            assert_eq!(DTYPES.iter().filter(|(f, o)| *f == file || *o == ours).count(), 1, "{file}");
        }
        let missing: Vec<_> = DType::ALL.iter().filter(|d| !DTYPES.iter().any(|(_, o)| o == *d)).collect();
        assert_eq!(missing, [&DType::Fp4x2]);
    }

    #[test]
    fn packed_fp4_comes_as_f4() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.safetensors");
        let view = TensorView::new(Dtype::F4, vec![2, 6], &[1, 2, 3, 4, 5, 6]).unwrap();
        fs::write(&path, safetensors::serialize([("x", view)], None).unwrap()).unwrap();
        let (_, x) = read(&path, crate::operators()[0]).unwrap().remove(0);
        assert_eq!((x.spec(), x.bytes()), (TensorSpec::new(DType::Fp4x2, [2, 3]), &[1, 2, 3, 4, 5, 6][..]));
    }

    #[test]
    fn bools_bytes_of_e8m0_and_scalars_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.safetensors");
        let read_one = |operator: &str, name: &str, dtype, shape: Vec<usize>, bytes: &[u8]| {
            let view = TensorView::new(dtype, shape, bytes).unwrap();
            fs::write(&path, safetensors::serialize([(name, view)], None).unwrap()).unwrap();
            Ok::<_, Failure>(read(&path, crate::operator(operator).unwrap())?.remove(0).1.spec())
        };
        let flags = read_one("causal_conv1d_fwd", "has_initial_state", Dtype::BOOL, vec![2], &[0, 1]);
        assert_eq!(flags.unwrap(), TensorSpec::new(DType::U8, [2]));
        assert!(read_one("rmsnorm", "x", Dtype::BOOL, vec![2], &[0, 1]).is_err());
        let scales = read_one("upcast_from_mxfp", "scale", Dtype::U8, vec![1, 2], &[127, 128]);
        assert_eq!(scales.unwrap(), TensorSpec::new(DType::E8M0, [1, 2]));
        let scale = read_one("per_tensor_quant_static", "scale", Dtype::F32, vec![], &1f32.to_le_bytes());
        assert_eq!(scale.unwrap(), TensorSpec::new(DType::F32, [1]));
    }

    #[test]
    fn every_type_comes_back_from_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.safetensors");
        let op = crate::operators()[0];
        for dtype in DType::ALL {
            let bytes: Vec<u8> = (0..6 * dtype.size_bytes() as u8).collect();
            let tensor = HostTensor::from_bytes(TensorSpec::new(dtype, [2, 3]), bytes.clone()).unwrap();
            write(&path, &[("x", tensor)], &[("operator", "none")]).unwrap();
            let back = read(&path, op).unwrap();
            assert_eq!((&*back[0].0, back[0].1.bytes()), ("x", &bytes[..]), "{dtype}");
            let want = if dtype == DType::Fp4x2 { DType::U8 } else { dtype };
            assert_eq!(back[0].1.spec(), TensorSpec::new(want, [2, 3]));
        }
    }
}
