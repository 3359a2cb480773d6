//! Arguments of a foreign kernel: their notation, and their place in the argument segment.

use hk_codeobj::Kernel;
use hk_core::{bf16, f16};
use safetensors::tensor::Dtype;
use std::path::PathBuf;
use std::str::FromStr;

/// An argument as the command line gives it: `[@OFFSET=]VALUE`.
#[derive(Debug, Clone, PartialEq)]
pub struct Arg {
    /// Where it goes in the argument segment, in bytes. Without it, behind the argument before.
    pub offset: Option<u32>,
    /// What goes there.
    pub value: Value,
}

/// What an argument is.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A scalar, a null pointer or bytes: little endian.
    Bytes(Vec<u8>),
    /// The address of a buffer that holds a tensor of a safetensors file.
    Tensor {
        /// The file; without it, the one of `--in`.
        file: Option<PathBuf>,
        name: String,
        /// It is an output as well.
        output: bool,
    },
    /// The address of a buffer that the kernel fills.
    Output(Output),
    /// The address of a buffer that holds these, one behind the other.
    Table(Vec<Value>),
}

/// A buffer that the kernel fills.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// What every byte is before the launch. Without it, the emulator's poison.
    pub fill: Option<u8>,
}

impl Value {
    fn size(&self) -> u32 {
        match self {
            Value::Bytes(bytes) => u32::try_from(bytes.len()).unwrap_or(u32::MAX),
            Value::Tensor { .. } | Value::Output(_) | Value::Table(_) => 8,
        }
    }
}

impl FromStr for Arg {
    type Err = String;

    fn from_str(text: &str) -> Result<Arg, String> {
        let (offset, value) = match text.strip_prefix('@') {
            None => (None, text),
            Some(rest) => {
                let (offset, value) = rest.split_once('=').ok_or("expected @OFFSET=VALUE")?;
                let wrong = || format!("offset `{offset}` is not a number of bytes");
                let offset = integer(offset).and_then(|n| n.try_into().ok()).ok_or_else(wrong)?;
                (Some(offset), value)
            }
        };
        Ok(Arg { offset, value: value.parse()? })
    }
}

impl FromStr for Value {
    type Err = String;

    fn from_str(text: &str) -> Result<Value, String> {
        let tensor = |text: &str, output| {
            let (file, name) = text.split_once('#')?;
            let file = (!file.is_empty()).then(|| file.into());
            (!name.is_empty()).then(|| Value::Tensor { file, name: name.into(), output })
        };
        if text == "null" {
            return Ok(Value::Bytes(vec![0; 8]));
        }
        match text.split_once(':') {
            Some(("inout", rest)) => tensor(rest, true).ok_or_else(|| "expected inout:[FILE]#TENSOR".into()),
            Some(("out", rest)) => rest.parse().map(Value::Output),
            Some(("at", values)) => {
                values.split(';').map(str::parse).collect::<Result<_, _>>().map(Value::Table)
            }
            Some(("hex", digits)) => hex(digits).map(Value::Bytes),
            Some((kind, number)) if !kind.contains('#') => scalar(kind, number).map(Value::Bytes),
            _ => tensor(text, false).ok_or_else(|| {
                "expected TYPE:NUMBER, [FILE]#TENSOR, inout:[FILE]#TENSOR, out:NAME=DTYPE[SHAPE], hex:BYTES, \
                 at:VALUE;VALUE or null"
                    .into()
            }),
        }
    }
}

/// A decimal number, or a hexadecimal one behind `0x`; both with an optional sign.
fn integer(text: &str) -> Option<i128> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let n = match digits.strip_prefix("0x") {
        Some(digits) => i128::from_str_radix(digits, 16),
        None => digits.parse(),
    };
    n.ok().map(|n| if negative { -n } else { n })
}

fn scalar(kind: &str, text: &str) -> Result<Vec<u8>, String> {
    macro_rules! integer {
        ($t:ty) => {
            integer(text).and_then(|n| <$t>::try_from(n).ok()).map(|n| n.to_le_bytes().to_vec())
        };
    }
    macro_rules! float {
        ($t:ty) => {
            text.parse::<$t>().ok().map(|x| x.to_le_bytes().to_vec())
        };
    }
    let bytes = match kind {
        "i8" => integer!(i8),
        "u8" => integer!(u8),
        "i16" => integer!(i16),
        "u16" => integer!(u16),
        "i32" => integer!(i32),
        "u32" => integer!(u32),
        "i64" => integer!(i64),
        "u64" => integer!(u64),
        "f16" => float!(f16),
        "bf16" => float!(bf16),
        "f32" => float!(f32),
        "f64" => float!(f64),
        _ => {
            return Err(format!(
                "no scalar type `{kind}`, expected one of i8, u8, i16, u16, i32, u32, i64, u64, f16, bf16, f32, f64"
            ));
        }
    };
    bytes.ok_or_else(|| format!("`{text}` is no {kind}"))
}

fn hex(digits: &str) -> Result<Vec<u8>, String> {
    let pairs = digits.as_bytes().chunks(2);
    let bytes = pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    match bytes.collect::<Option<Vec<u8>>>() {
        Some(bytes) if digits.len().is_multiple_of(2) && !bytes.is_empty() => Ok(bytes),
        _ => Err(format!("`{digits}` is not pairs of hexadecimal digits")),
    }
}

impl FromStr for Output {
    type Err = String;

    /// `NAME=DTYPE[D, ...]`, then `,zero` or `,fill=BYTE`.
    fn from_str(text: &str) -> Result<Output, String> {
        let parts = || {
            let (name, rest) = text.split_once('=')?;
            let (dtype, rest) = rest.split_once('[')?;
            let (shape, fill) = rest.split_once(']')?;
            (!name.is_empty()).then_some((name, dtype, shape, fill))
        };
        let (name, dtype, shape, fill) = parts()
            .ok_or("expected out:NAME=DTYPE[SHAPE], with `,zero` or `,fill=BYTE` behind it if wanted")?;
        let named = serde_json::Value::String(dtype.to_ascii_uppercase());
        let dtype: Dtype = serde_json::from_value(named).map_err(|_| {
            format!("`{dtype}` is no element type of safetensors, such as bf16, f32 or f8_e4m3")
        })?;
        let sizes = shape.split(',').map(|n| n.trim().parse().ok());
        let shape: Vec<usize> =
            sizes.collect::<Option<_>>().ok_or_else(|| format!("`[{shape}]` is no shape"))?;
        let fill = match fill {
            "" => None,
            ",zero" => Some(0),
            _ => {
                let byte = fill.strip_prefix(",fill=").and_then(integer).and_then(|n| n.try_into().ok());
                Some(byte.ok_or_else(|| format!("`{fill}` is neither `,zero` nor `,fill=BYTE`"))?)
            }
        };
        let output = Output { name: name.into(), dtype, shape, fill };
        output.bytes().map(|_| output).ok_or_else(|| format!("`{text}` is not a whole number of bytes"))
    }
}

impl Output {
    /// Its size, unless it is not whole or does not fit a number.
    pub fn bytes(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        let bits = elements.checked_mul(self.dtype.bitsize())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// The size of the argument segment that a caller fills, and where each argument goes in it.
///
/// An argument goes to its own offset if it has one; else, with `slot`, to the next multiple of that; else to the place of
/// the next argument in the kernel's list, which must have its size; else, for kernels without a list, to the next multiple
/// of its size.
///
/// # Errors
/// If arguments do not fit their places or each other, or if the list has more of them.
pub fn layout(kernel: &Kernel, slot: Option<u32>, args: &[Arg]) -> Result<(u32, Vec<u32>), String> {
    let listed: Vec<_> = kernel.args.iter().filter(|arg| !arg.hidden()).collect();
    let total = kernel.explicit_arg_bytes;
    let mut places: Vec<u32> = Vec::with_capacity(args.len());
    let mut end = 0u32;
    let mut by_list = 0;
    for (i, arg) in args.iter().enumerate() {
        let size = arg.value.size();
        let at = if let Some(offset) = arg.offset {
            offset
        } else if let Some(step) = slot {
            end.checked_next_multiple_of(step).unwrap_or(u32::MAX)
        } else if listed.is_empty() {
            end.checked_next_multiple_of(size.clamp(1, 8).next_power_of_two()).unwrap_or(u32::MAX)
        } else {
            let Some(next) = listed.iter().find(|arg| arg.offset >= end) else {
                return Err(format!("argument {i} is one too many: the kernel lists {}", listed.len()));
            };
            if next.size != size {
                let place = next.offset;
                return Err(format!(
                    "argument {i} has {size} bytes, the kernel's, at byte {place}, has {}; parts of an argument go to \
                     their offsets, as in @{place}=i32:1",
                    next.size
                ));
            }
            by_list += 1;
            next.offset
        };
        if at.checked_add(size).is_none_or(|end| end > total) {
            return Err(format!(
                "argument {i} has {size} bytes at byte {at}, the kernel's arguments end at byte {total}"
            ));
        }
        let overlaps = |(j, &other): (usize, &u32)| {
            (at < other + args[j].value.size() && other < at + size).then_some((j, other))
        };
        if let Some((j, other)) = places.iter().enumerate().find_map(overlaps) {
            return Err(format!(
                "argument {i} has {size} bytes at byte {at}, where argument {j} is, at byte {other}"
            ));
        }
        places.push(at);
        end = at + size;
    }
    if by_list == args.len() && by_list < listed.len() {
        return Err(format!("{} arguments are given, the kernel lists {}", args.len(), listed.len()));
    }
    Ok((total, places))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Value {
        text.parse::<Arg>().unwrap().value
    }

    #[test]
    fn scalars_are_little_endian() {
        for (text, bytes) in [
            ("i32:-2", &[0xfe, 0xff, 0xff, 0xff][..]),
            ("u8:255", &[255]),
            ("u16:0xBEEF", &[0xef, 0xbe]),
            ("u64:0x102030405060708", &[8, 7, 6, 5, 4, 3, 2, 1]),
            ("f32:-0.5", &[0, 0, 0, 0xbf]),
            ("bf16:1", &[0x80, 0x3f]),
            ("f16:inf", &[0, 0x7c]),
            ("hex:00aBff", &[0, 0xab, 0xff]),
            ("null", &[0; 8]),
        ] {
            assert_eq!(value(text), Value::Bytes(bytes.into()), "{text}");
        }
    }

    #[test]
    fn buffers_have_names() {
        let tensor = |file: Option<&str>, name: &str, output| Value::Tensor {
            file: file.map(Into::into),
            name: name.into(),
            output,
        };
        assert_eq!(value("in.safetensors#q"), tensor(Some("in.safetensors"), "q", false));
        assert_eq!(value("#layers:0#q"), tensor(None, "layers:0#q", false));
        assert_eq!(value("inout:#acc"), tensor(None, "acc", true));
        let out = |dtype, shape: &[usize], fill| {
            Value::Output(Output { name: "o".into(), dtype, shape: shape.into(), fill })
        };
        assert_eq!(value("out:o=bf16[128, 4096]"), out(Dtype::BF16, &[128, 4096], None));
        assert_eq!(value("out:o=F8_E4M3FNUZ[3],zero"), out(Dtype::F8_E4M3FNUZ, &[3], Some(0)));
        assert_eq!(value("out:o=f4[6],fill=0x7f"), out(Dtype::F4, &[6], Some(0x7f)));
        let table = vec![tensor(None, "x", false), Value::Bytes(vec![5, 0, 0, 0])];
        assert_eq!(value("at:#x;u32:5"), Value::Table(table));
        let at: Arg = "@0x20=i32:1".parse().unwrap();
        assert_eq!(at.offset, Some(32));
    }

    #[test]
    fn what_is_no_argument_says_why() {
        for (text, why) in [
            ("x", "expected TYPE:NUMBER"),
            ("i32:5000000000", "`5000000000` is no i32"),
            ("u32:-1", "`-1` is no u32"),
            ("f32:half", "`half` is no f32"),
            ("int:5", "no scalar type `int`"),
            ("hex:123", "not pairs of hexadecimal digits"),
            ("hex:", "not pairs of hexadecimal digits"),
            ("hex:é", "not pairs of hexadecimal digits"),
            ("@x=i32:1", "offset `x` is not a number of bytes"),
            ("@-8=i32:1", "offset `-8` is not a number of bytes"),
            ("@8", "expected @OFFSET=VALUE"),
            ("#", "expected TYPE:NUMBER"),
            ("at:#x;", "expected TYPE:NUMBER"),
            ("inout:x", "expected inout:[FILE]#TENSOR"),
            ("out:bf16[2]", "expected out:NAME=DTYPE[SHAPE]"),
            ("out:y=half[2]", "`half` is no element type"),
            ("out:y=f32[2,x]", "`[2,x]` is no shape"),
            ("out:y=f32[2],one", "neither `,zero` nor"),
            ("out:y=f32[2],fill=256", "neither `,zero` nor"),
            ("out:y=f4[3]", "not a whole number of bytes"),
            ("out:y=f64[4294967296,4294967296]", "not a whole number of bytes"),
        ] {
            let error = text.parse::<Arg>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
