//! What ties the parameter structs of Rust to those of the device code.
//!
//! hk-build generates the structs of a family's kernels, and a reference to each entry point, from what the compiler says of
//! the device code. A few structs of hk-core's own headers are filled in by hk-core's functions: they are declared in Rust, and
//! compared with the headers field by field when a family crate is compiled.

use crate::CodeObjects;
use std::fmt;
use std::marker::PhantomData;

pub use crate::GlobalLayout as Global;
pub use crate::plan::heads::HeadsParams;
pub use crate::plan::rope::RopeParams as Rope;
pub use crate::quant::{BlockRule, QuantFormat};

/// An entry point of a HIP source, and the parameter struct that it takes.
pub struct KernelRef<P> {
    objects: &'static CodeObjects,
    name: &'static str,
    params: PhantomData<fn(&P)>,
}

impl<P> KernelRef<P> {
    /// The entry point `name` of `objects`, which takes a `P`. Family crates have `kernels::..::Params::kernel` instead, which
    /// knows what there is.
    pub const fn new(objects: &'static CodeObjects, name: &'static str) -> Self {
        Self { objects, name, params: PhantomData }
    }

    /// The entry point `name` of whichever source has it. Called by generated code, in constants.
    ///
    /// # Panics
    /// When compiled, if no source has it.
    #[doc(hidden)]
    pub const fn find(sources: &[(&'static CodeObjects, &[&str])], name: &'static str) -> Self {
        let mut i = 0;
        while i < sources.len() {
            let mut j = 0;
            while j < sources[i].1.len() {
                if same(sources[i].1[j], name) {
                    return Self::new(sources[i].0, name);
                }
                j += 1;
            }
            i += 1;
        }
        panic!("no source has an entry point of this name that takes this struct")
    }

    /// Name of the entry point.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The source's code objects.
    pub const fn objects(&self) -> &'static CodeObjects {
        self.objects
    }
}

impl<P> Clone for KernelRef<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for KernelRef<P> {}

impl<P> fmt::Debug for KernelRef<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelRef({} in {})", self.name, self.objects.name())
    }
}

/// A struct of the device headers, declared in Rust.
#[doc(hidden)]
pub trait Declared: Sized {
    /// Names and offsets of its fields, in order.
    const FIELDS: &'static [(&'static str, usize)];
}

/// States the fields of a struct that stands for one of the device headers. Its names are those of the header.
macro_rules! declared {
    ($type:ident { $($field:ident),+ $(,)? }) => {
        impl $crate::params::Declared for $type {
            const FIELDS: &'static [(&'static str, usize)] =
                &[$((stringify!($field), std::mem::offset_of!($type, $field))),+];
        }
    };
}
pub(crate) use declared;

/// Compares a declared struct with the device code's: size, names and offsets.
///
/// # Panics
/// When compiled, if they differ.
#[doc(hidden)]
pub const fn check<T: Declared>(size: usize, fields: &[(&str, usize)]) {
    assert!(size_of::<T>() == size, "hk-core and its headers differ: the size of a struct");
    assert!(
        T::FIELDS.len() == fields.len(),
        "hk-core and its headers differ: the number of fields of a struct"
    );
    let mut i = 0;
    while i < fields.len() {
        assert!(same(T::FIELDS[i].0, fields[i].0), "hk-core and its headers differ: the name of a field");
        assert!(T::FIELDS[i].1 == fields[i].1, "hk-core and its headers differ: the offset of a field");
        i += 1;
    }
}

/// Entry points differ at the end: so does the comparison begin there.
const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = a.len();
    while i > 0 {
        i -= 1;
        if a[i] != b[i] {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    static OBJECTS: [CodeObjects; 2] = [CodeObjects::missing("a", ""), CodeObjects::missing("b", "")];

    #[test]
    fn entry_points_are_found_in_their_source() {
        let sources: &[(&'static CodeObjects, &[&str])] =
            &[(&OBJECTS[0], &["one", "two"]), (&OBJECTS[1], &["six", "ten"])];
        let found = KernelRef::<u32>::find(sources, "six");
        assert_eq!((found.name(), found.objects().name()), ("six", "b"));
        assert_eq!(format!("{found:?}"), "KernelRef(six in b)");
        assert!(std::panic::catch_unwind(|| KernelRef::<u32>::find(sources, "sixx")).is_err());
    }

    #[test]
    fn a_struct_that_differs_is_refused() {
        check::<Global>(56, &[("data", 0), ("shape", 8), ("strides", 24)]);
        let refused = |size, fields: &[(&str, usize)]| {
            std::panic::catch_unwind(|| check::<Global>(size, fields)).is_err()
        };
        assert!(refused(64, &[("data", 0), ("shape", 8), ("strides", 24)]));
        assert!(refused(56, &[("data", 0), ("shape", 8)]));
        assert!(refused(56, &[("data", 0), ("strides", 8), ("shape", 24)]));
        assert!(refused(56, &[("data", 0), ("shape", 8), ("strides", 32)]));
    }
}
