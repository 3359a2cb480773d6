//! What the sources' kernels take: entry points, and the parameter structs field by field.
//!
//! The compiler itself is asked: with `HK_DESCRIBE`, `HK_ENTRY` of `hk/entry.h` declares a struct `hk_entry_<name>` that
//! holds the entry point's parameters, and clang prints the layout of every struct (`-fdump-record-layouts-canonical`). The
//! Rust structs are generated from that, so that the two sides cannot drift.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::source::{Unit, identifier};

/// The committed copy of a package's [`Interface`], beside its sources. Where there is no compiler, or `HK_EMBED` is 0, the
/// Rust structs are generated from it. `cargo xtask interface --update` writes it, and a test of xtask compares it.
pub const INTERFACE_FILE: &str = "kernels.json";

/// Prefix of the structs that `HK_ENTRY` declares.
const ENTRY: &str = "hk_entry_";
/// How clang prints the anonymous namespace.
const ANONYMOUS: &str = "(anonymous namespace)";
/// Structs of hk-core's headers that the host fills through hk-core's own types, of the same name in `hk_core::params`.
const SHARED: [&str; 5] = ["Global", "Rope", "HeadsParams", "QuantFormat", "BlockRule"];

/// The entry points of a package, and the structs that they take.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// By source (its stem): its entry points, each with the name of its parameter struct.
    pub entries: BTreeMap<String, BTreeMap<String, String>>,
    /// By C++ name, `gemm::Params`; a struct of an anonymous namespace has the stem of its source for a namespace.
    pub structs: BTreeMap<String, Struct>,
}

/// A struct that the host fills in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Struct {
    /// Size in bytes.
    pub size: usize,
    /// Its fields, which cover it without padding.
    pub fields: Vec<Field>,
}

/// A field of a struct.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Field {
    /// Name.
    pub name: String,
    /// Offset in bytes.
    pub offset: usize,
    /// Rust scalar type, or the C++ name of a struct.
    #[serde(rename = "type")]
    pub ty: String,
    /// Lengths, if it is an array, outermost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub array: Vec<usize>,
}

/// A struct as clang prints it.
struct Record<'a> {
    size: usize,
    /// Offset, and type and name, of each field.
    fields: Vec<(&'a str, &'a str)>,
}

impl Interface {
    /// Reads what clang has printed for the source `stem`.
    ///
    /// # Errors
    /// What is wrong with a struct that an entry point takes: padding, or a field that the host cannot fill in.
    pub(crate) fn parse(stem: &str, dump: &str) -> Result<Interface, String> {
        let records = records(dump);
        let mut interface = Interface::default();
        let mut entries = BTreeMap::new();
        for (name, record) in &records {
            // A source whose entry points take several structs has a namespace for each but one.
            let unqualified = name.rsplit("::").next().unwrap_or(name);
            let Some(entry) = unqualified.strip_prefix(ENTRY) else { continue };
            let [(_, field)] = record.fields[..] else {
                return Err(format!("{entry}: expected the one field `params`"));
            };
            let (ty, _) = type_and_name(field);
            let params = struct_name(ty).ok_or_else(|| format!("{entry}: takes {ty}, expected a struct"))?;
            interface.add(stem, params, &records)?;
            entries.insert(entry.to_owned(), qualified(stem, params));
        }
        if !entries.is_empty() {
            interface.entries.insert(identifier(stem), entries);
        }
        Ok(interface)
    }

    /// Adds a struct and those it is made of; gives its size.
    fn add(&mut self, stem: &str, name: &str, records: &BTreeMap<&str, Record>) -> Result<usize, String> {
        let key = qualified(stem, name);
        if let Some(known) = self.structs.get(&key) {
            return Ok(known.size);
        }
        let record = records.get(name).ok_or_else(|| format!("{name}: the compiler prints no layout"))?;
        let (mut fields, mut end) = (Vec::new(), 0);
        for (offset, field) in &record.fields {
            let offset: usize = offset.parse().map_err(|_| format!("{name}: {field}: a bit field"))?;
            let (ty, field) = type_and_name(field);
            let (element, array) = array_of(ty);
            let (ty, size) = match struct_name(element) {
                Some(inner) => (qualified(stem, inner), self.add(stem, inner, records)?),
                None => {
                    let (ty, size) = scalar(element).ok_or_else(|| {
                        format!("{name}::{field}: a parameter of type {element}, which a host cannot fill in")
                    })?;
                    (ty.to_owned(), size)
                }
            };
            if offset != end {
                return Err(format!("{name}: padding before {field}: add a field of {} bytes", offset - end));
            }
            end += size * array.iter().product::<usize>();
            fields.push(Field { name: field.to_owned(), offset, ty, array });
        }
        if end != record.size {
            return Err(format!("{name}: padding at its end: add a field of {} bytes", record.size - end));
        }
        self.structs.insert(key, Struct { size: record.size, fields });
        Ok(record.size)
    }

    /// Adds the entry points and structs of another source of the package.
    ///
    /// # Errors
    /// [`Error::Interface`] if two sources have entry points of one name, or structs of one name that differ.
    pub(crate) fn merge(&mut self, other: Interface) -> Result<(), Error> {
        for (name, new) in other.structs {
            match self.structs.get(&name) {
                Some(known) if *known != new => {
                    return Err(Error::Interface(format!(
                        "{name}: two sources have different structs of this name"
                    )));
                }
                Some(_) => {}
                None => drop(self.structs.insert(name, new)),
            }
        }
        for (source, entries) in other.entries {
            for (known, theirs) in &self.entries {
                if let Some(entry) = entries.keys().find(|entry| theirs.contains_key(*entry)) {
                    let text = format!("{entry}: an entry point of both {known} and {source}");
                    return Err(Error::Interface(text));
                }
            }
            self.entries.insert(source, entries);
        }
        Ok(())
    }

    /// The interface of a package, from those of its sources, each for one target or several.
    ///
    /// # Errors
    /// [`Error::Interface`] if a source's differ between targets, or two sources contradict each other.
    pub(crate) fn of_package<'a>(
        sources: impl IntoIterator<Item = (&'a Unit, &'a Interface)>,
    ) -> Result<Interface, Error> {
        let mut known: BTreeMap<String, (&Unit, &Interface)> = BTreeMap::new();
        let mut package = Interface::default();
        for (unit, interface) in sources {
            let label = unit.label();
            match known.get(&label) {
                Some((other, theirs)) if *theirs != interface => {
                    let (a, b) = (other.arch, unit.arch);
                    let text =
                        format!("{label}: entry points or their parameters differ between {a} and {b}");
                    return Err(Error::Interface(text));
                }
                Some(_) => {}
                None => {
                    package.merge(interface.clone())?;
                    known.insert(label, (unit, interface));
                }
            }
        }
        Ok(package)
    }

    /// Reads [`INTERFACE_FILE`] of `dir`. A package without the file has an empty interface.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read or is not JSON of this shape.
    pub fn read(dir: &Path) -> Result<Interface, Error> {
        let path = dir.join(INTERFACE_FILE);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| Error::io(&path)(e.into())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Interface::default()),
            Err(error) => Err(Error::io(&path)(error)),
        }
    }

    /// Writes [`INTERFACE_FILE`] into `dir`.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), Error> {
        let path = dir.join(INTERFACE_FILE);
        let mut text = serde_json::to_string_pretty(self).map_err(|e| Error::io(&path)(e.into()))?;
        text.push('\n');
        fs::write(&path, text).map_err(Error::io(&path))
    }

    /// The names of the entry points and structs that are not the same in `other`, or that only one of the two has.
    pub fn differences(&self, other: &Interface) -> Vec<String> {
        let entries = |interface: &Interface| -> BTreeSet<[String; 3]> {
            let rows = interface.entries.iter().flat_map(|(source, entries)| {
                entries.iter().map(move |(entry, params)| [entry, source, params].map(String::clone))
            });
            rows.collect()
        };
        let (ours, theirs) = (entries(self), entries(other));
        let entries: BTreeSet<String> =
            ours.symmetric_difference(&theirs).map(|[entry, ..]| entry.clone()).collect();
        let names: BTreeSet<&String> = self.structs.keys().chain(other.structs.keys()).collect();
        let structs = names.into_iter().filter(|name| self.structs.get(*name) != other.structs.get(*name));
        entries.into_iter().chain(structs.cloned()).collect()
    }

    /// The Rust modules of the structs, each with `kernel`, which names an entry point.
    pub(crate) fn rust(&self) -> String {
        let mut modules: BTreeMap<String, String> = BTreeMap::new();
        for (name, layout) in &self.structs {
            if shared(name).is_some() {
                continue;
            }
            let (module, rust_name) = rust_path(name);
            let text = modules.entry(module).or_default();
            let _ = writeln!(text, "    /// `{name}` of the device code.");
            let _ = writeln!(
                text,
                "    #[derive(Debug, Clone, Copy)]\n    #[repr(C)]\n    pub struct {rust_name} {{"
            );
            for field in &layout.fields {
                let element = self.rust_type(&field.ty);
                let ty = field.array.iter().rev().fold(element, |ty, n| format!("[{ty}; {n}]"));
                let _ = writeln!(text, "        pub {}: {ty},", rust_field(&field.name));
            }
            let _ = writeln!(text, "    }}");
            let _ = writeln!(text, "    const _: () = assert!(size_of::<{rust_name}>() == {});", layout.size);
            for of in ["Zeroable", "Pod"] {
                let _ = writeln!(text, "    // SAFETY: numbers and structs of numbers, without padding.");
                let _ = writeln!(text, "    unsafe impl ::bytemuck::{of} for {rust_name} {{}}");
            }
            let sources: Vec<(&String, Vec<&String>)> = self
                .entries
                .iter()
                .map(|(source, entries)| {
                    (source, entries.iter().filter(|(_, p)| *p == name).map(|(entry, _)| entry).collect())
                })
                .filter(|(_, entries): &(_, Vec<_>)| !entries.is_empty())
                .collect();
            if sources.is_empty() {
                continue;
            }
            let _ = writeln!(text, "    impl {rust_name} {{");
            let _ = writeln!(
                text,
                "        /// The entry point `name`, which takes this struct: in a `const`, a name that no source has does not compile."
            );
            let _ = writeln!(
                text,
                "        pub const fn kernel(name: &'static str) -> ::hk_core::KernelRef<Self> {{\n            \
                 ::hk_core::KernelRef::find(&["
            );
            for (source, entries) in sources {
                let _ = writeln!(text, "                (&super::{}, &{entries:?}),", source.to_uppercase());
            }
            let _ = writeln!(text, "            ], name)\n        }}\n    }}");
        }
        let mut text = self.shared_checks();
        for (module, structs) in modules {
            let _ = writeln!(
                text,
                "/// The parameters of kernels of `{module}`.\npub mod {module} {{\n{structs}}}"
            );
        }
        text
    }

    /// Compares the structs that hk-core declares with those of the device code.
    fn shared_checks(&self) -> String {
        let mut text = String::new();
        for (name, layout) in &self.structs {
            let Some(rust) = shared(name) else { continue };
            let fields: Vec<(&str, usize)> = layout.fields.iter().map(|f| (&*f.name, f.offset)).collect();
            let _ = writeln!(
                text,
                "const _: () = ::hk_core::params::check::<{rust}>({}, &{fields:?});",
                layout.size
            );
        }
        text
    }

    fn rust_type(&self, ty: &str) -> String {
        match (self.structs.contains_key(ty), shared(ty)) {
            (_, Some(rust)) => rust,
            (true, None) => {
                let (module, name) = rust_path(ty);
                format!("super::{module}::{name}")
            }
            (false, None) => ty.to_owned(),
        }
    }
}

/// The structs of a dump, by name.
fn records(dump: &str) -> BTreeMap<&str, Record<'_>> {
    let mut records = BTreeMap::new();
    for part in dump.split("*** Dumping AST Record Layout").skip(1) {
        let mut lines = part.lines().filter_map(|line| line.split_once(" | "));
        let Some(name) = lines.next().and_then(|(_, text)| struct_name(text)) else { continue };
        let mut record = Record { size: 0, fields: Vec::new() };
        for (offset, text) in lines {
            // Two blanks a level: the first level are the fields, and deeper ones those of fields.
            match text.strip_prefix("  ") {
                Some(field) if !field.starts_with(' ') => record.fields.push((offset.trim(), field)),
                _ => {}
            }
        }
        let size = part.split_once("[sizeof=").and_then(|(_, rest)| rest.split(',').next()?.parse().ok());
        record.size = size.unwrap_or_default();
        records.insert(name, record);
    }
    records
}

/// `struct a::B` is `a::B`.
fn struct_name(ty: &str) -> Option<&str> {
    let name = ty.strip_prefix("struct ").or_else(|| ty.strip_prefix("class "))?;
    (!name.ends_with(['*', '&'])).then_some(name.trim_end_matches(" (empty)"))
}

/// `unsigned int[4] shape` is `unsigned int[4]` and `shape`.
fn type_and_name(field: &str) -> (&str, &str) {
    field.trim_end().rsplit_once(' ').unwrap_or((field, ""))
}

/// `T[2][3]` is `T` and `[2, 3]`.
fn array_of(ty: &str) -> (&str, Vec<usize>) {
    let Some(at) = ty.find('[').filter(|_| ty.ends_with(']')) else { return (ty, Vec::new()) };
    let lengths = ty[at..].split(['[', ']']).filter_map(|n| n.parse().ok()).collect();
    (&ty[..at], lengths)
}

/// The Rust type of a scalar, and its size.
fn scalar(ty: &str) -> Option<(&'static str, usize)> {
    Some(match ty {
        "unsigned char" => ("u8", 1),
        "signed char" => ("i8", 1),
        "unsigned short" => ("u16", 2),
        "short" => ("i16", 2),
        "unsigned int" => ("u32", 4),
        "int" => ("i32", 4),
        "unsigned long" | "unsigned long long" => ("u64", 8),
        "long" | "long long" => ("i64", 8),
        "float" => ("f32", 4),
        "double" => ("f64", 8),
        // Parameters are plain data: a host can fill in any number. Another size than this leaves padding, which is refused.
        enumeration if enumeration.starts_with("enum ") => ("u32", 4),
        pointer if pointer.ends_with('*') => ("u64", 8),
        _ => return None,
    })
}

/// With the source instead of the anonymous namespace.
fn qualified(stem: &str, name: &str) -> String {
    let name = name.replace(ANONYMOUS, &identifier(stem));
    if name.contains("::") { name } else { format!("{}::{name}", identifier(stem)) }
}

/// The module and the Rust name of a struct: `gemm::Pair<struct gemm::Params>` is `PairParams` of `gemm`.
fn rust_path(name: &str) -> (String, String) {
    let (plain, arguments) = name.split_once('<').unwrap_or((name, ""));
    let (module, last) = plain.split_once("::").unwrap_or(("", plain));
    let mut rust: String = last.split("::").collect();
    for argument in arguments.trim_end_matches('>').split(", ").filter(|a| !a.is_empty()) {
        let short = argument.rsplit("::").next().unwrap_or(argument);
        rust.extend(short.chars().filter(char::is_ascii_alphanumeric));
    }
    (module.to_owned(), rust)
}

/// The type of hk-core that stands for a struct of its headers.
fn shared(name: &str) -> Option<String> {
    let name = name.strip_prefix("hk::")?;
    SHARED.contains(&name).then(|| format!("::hk_core::params::{name}"))
}

/// A field's name, which may be a Rust keyword.
fn rust_field(name: &str) -> String {
    let keywords: BTreeSet<&str> = [
        "as", "dyn", "fn", "impl", "in", "let", "loop", "match", "mod", "move", "pub", "ref", "trait",
        "type", "use", "where",
    ]
    .into();
    if keywords.contains(name) { format!("r#{name}") } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "
*** Dumping AST Record Layout
         0 | struct hk::Global
         0 |   unsigned long long data
         8 |   unsigned int[2] shape
           | [sizeof=16, dsize=16, align=8,
           |  nvsize=16, nvalign=8]

*** Dumping AST Record Layout
         0 | struct (anonymous namespace)::Params
         0 |   struct hk::Global x
         0 |     unsigned long long data
         8 |     unsigned int[2] shape
        16 |   struct rms::Scalars[2] scalars
        32 |   enum hk::Kind kind
        36 |   float type
           | [sizeof=40, dsize=40, align=8,
           |  nvsize=40, nvalign=8]

*** Dumping AST Record Layout
         0 | struct rms::Scalars
         0 |   float eps
         4 |   unsigned int batch
           | [sizeof=8, dsize=8, align=4,
           |  nvsize=8, nvalign=4]

*** Dumping AST Record Layout
         0 | struct hk_entry_norm_bf16
         0 |   struct (anonymous namespace)::Params params
         0 |     struct hk::Global x
           | [sizeof=40, dsize=40, align=8,
           |  nvsize=40, nvalign=8]
";

    #[test]
    fn entries_and_structs_are_read() {
        let interface = Interface::parse("rms-norm", DUMP).unwrap();
        assert_eq!(interface.entries["rms_norm"]["norm_bf16"], "rms_norm::Params");
        let of_namespace = DUMP.replace("hk_entry_norm_bf16", "a::hk_entry_norm_bf16");
        assert_eq!(Interface::parse("rms-norm", &of_namespace).unwrap(), interface);
        let params = &interface.structs["rms_norm::Params"];
        let fields: Vec<_> = params.fields.iter().map(|f| (&*f.name, f.offset, &*f.ty, &*f.array)).collect();
        assert_eq!(
            fields,
            [
                ("x", 0, "hk::Global", &[][..]),
                ("scalars", 16, "rms::Scalars", &[2]),
                ("kind", 32, "u32", &[]),
                ("type", 36, "f32", &[])
            ]
        );
        let rust = interface.rust();
        for expected in [
            "pub mod rms_norm {",
            "pub x: ::hk_core::params::Global,",
            "pub scalars: [super::rms::Scalars; 2],",
            "pub r#type: f32,",
            "(&super::RMS_NORM, &[\"norm_bf16\"]),",
            "::hk_core::params::check::<::hk_core::params::Global>(16, &[(\"data\", 0), (\"shape\", 8)]);",
        ] {
            assert!(rust.contains(expected), "{expected} is not in\n{rust}");
        }
    }

    #[test]
    fn padding_and_types_that_a_host_cannot_fill_in_are_refused() {
        let refuse = |from: &str, to: &str| Interface::parse("a", &DUMP.replace(from, to)).unwrap_err();
        assert_eq!(
            refuse("4 |   unsigned int batch", "4 |   unsigned short batch"),
            "rms::Scalars: padding at its end: add a field of 2 bytes"
        );
        assert_eq!(
            refuse("0 |   float eps", "0 |   unsigned char eps"),
            "rms::Scalars: padding before batch: add a field of 3 bytes"
        );
        assert!(refuse("float eps", "_Bool eps").contains("rms::Scalars::eps: a parameter of type _Bool"));
    }

    #[test]
    fn one_name_is_one_struct_and_one_entry_point() {
        let mut package = Interface::parse("a", DUMP).unwrap();
        let twice = package.merge(Interface::parse("b", DUMP).unwrap()).unwrap_err().to_string();
        assert_eq!(twice, "norm_bf16: an entry point of both a and b");
        let mut package = Interface::parse("a", DUMP).unwrap();
        let other =
            DUMP.replace("hk_entry_norm_bf16", "hk_entry_other").replace("float eps", "unsigned int eps");
        let differ = package.merge(Interface::parse("b", &other).unwrap()).unwrap_err().to_string();
        assert_eq!(differ, "rms::Scalars: two sources have different structs of this name");
    }

    #[test]
    fn templates_have_a_name_of_their_arguments() {
        assert_eq!(rust_path("gemm::Pair<struct gemm::Params>"), ("gemm".into(), "PairParams".into()));
        assert_eq!(array_of("struct a::B[4][2]"), ("struct a::B", vec![4, 2]));
    }
}
