//! The metadata note: MessagePack, read by key.

use rmpv::ValueRef;

use crate::ParseError;

/// Nesting of the note: map, array of kernels, map, array of arguments, map, value. rmpv spends two levels on each.
const MAX_DEPTH: usize = 32;

fn error(reason: impl Into<String>) -> ParseError {
    ParseError::Metadata { reason: reason.into() }
}

/// A MessagePack map together with its path in the note, for error texts.
pub(crate) struct Map<'a, 'b> {
    path: String,
    entries: &'b [(ValueRef<'a>, ValueRef<'a>)],
}

/// Decodes a note's bytes.
pub(crate) fn decode(mut note: &[u8]) -> Result<ValueRef<'_>, ParseError> {
    rmpv::decode::read_value_ref_with_max_depth(&mut note, MAX_DEPTH)
        .map_err(|e| error(format!("not MessagePack: {e}")))
}

impl<'a, 'b> Map<'a, 'b> {
    pub(crate) fn new(path: impl Into<String>, value: &'b ValueRef<'a>) -> Result<Self, ParseError> {
        let path = path.into();
        match value {
            ValueRef::Map(entries) => Ok(Map { path, entries }),
            _ => Err(error(format!("{path} is not a map"))),
        }
    }

    fn find(&self, key: &str) -> Option<&'b ValueRef<'a>> {
        self.entries
            .iter()
            .find(|(k, _)| matches!(k, ValueRef::String(s) if s.as_str() == Some(key)))
            .map(|(_, v)| v)
    }

    fn require<T>(&self, key: &str, value: Option<T>) -> Result<T, ParseError> {
        value.ok_or_else(|| error(format!("{}{key} is missing", self.path)))
    }

    /// An unsigned number of at most 32 bits, if present.
    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, ParseError> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let number = match value {
            ValueRef::Integer(n) => n.as_u64().and_then(|n| u32::try_from(n).ok()),
            _ => None,
        };
        number.map(Some).ok_or_else(|| error(format!("{}{key} is not an unsigned 32-bit number", self.path)))
    }

    pub(crate) fn need_u32(&self, key: &str) -> Result<u32, ParseError> {
        let value = self.u32(key)?;
        self.require(key, value)
    }

    /// A truth value, if present. Compilers write booleans as such or as 0 and 1.
    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, ParseError> {
        match self.find(key) {
            Some(ValueRef::Boolean(b)) => Ok(Some(*b)),
            _ => Ok(self.u32(key)?.map(|n| n != 0)),
        }
    }

    /// A string, if present.
    pub(crate) fn str(&self, key: &str) -> Result<Option<&'b str>, ParseError> {
        match self.find(key) {
            None => Ok(None),
            Some(ValueRef::String(s)) => {
                s.as_str().map(Some).ok_or_else(|| error(format!("{}{key} is not UTF-8", self.path)))
            }
            Some(_) => Err(error(format!("{}{key} is not a string", self.path))),
        }
    }

    pub(crate) fn need_str(&self, key: &str) -> Result<&'b str, ParseError> {
        let value = self.str(key)?;
        self.require(key, value)
    }

    /// An array, if present.
    pub(crate) fn array(&self, key: &str) -> Result<Option<&'b [ValueRef<'a>]>, ParseError> {
        match self.find(key) {
            None => Ok(None),
            Some(ValueRef::Array(items)) => Ok(Some(items)),
            Some(_) => Err(error(format!("{}{key} is not an array", self.path))),
        }
    }

    pub(crate) fn need_array(&self, key: &str) -> Result<&'b [ValueRef<'a>], ParseError> {
        let value = self.array(key)?;
        self.require(key, value)
    }

    /// The strings of a list; none where it is missing.
    pub(crate) fn strings(&self, key: &str) -> Result<Vec<String>, ParseError> {
        let list = self.array(key)?.unwrap_or_default();
        let string = |value: &ValueRef<'_>| match value {
            ValueRef::String(s) => s.as_str().map(str::to_owned),
            _ => None,
        };
        Ok(list.iter().filter_map(string).collect())
    }

    /// Three unsigned numbers, if present.
    pub(crate) fn u32x3(&self, key: &str) -> Result<Option<[u32; 3]>, ParseError> {
        let Some(items) = self.array(key)? else { return Ok(None) };
        let numbers: Option<Vec<u32>> = match items.len() {
            3 => items.iter().map(|v| v.to_owned().as_u64().and_then(|n| u32::try_from(n).ok())).collect(),
            _ => None,
        };
        match numbers.as_deref() {
            Some(&[x, y, z]) => Ok(Some([x, y, z])),
            _ => Err(error(format!("{}{key} is not three unsigned 32-bit numbers", self.path))),
        }
    }
}
