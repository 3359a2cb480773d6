//! `hk inspect`.

use crate::out::{self, Table};
use crate::{CHOICES, Failure, Result, hot, list, run};
use hk_codeobj::{CodeObject, Kernel};
use hk_core::registry::{CallSpec, Operator, TensorSpec};
use hk_core::{Arch, CodeObjects, DType, Device};
use hk_emu::isa;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _};
use std::fmt::Write as _;
use std::str::FromStr;

/// Options of `hk inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The operator.
    #[arg(value_name = "OP")]
    operator: String,
    /// Only this target.
    #[arg(long)]
    target: Option<Arch>,
    /// Only kernels whose name contains this.
    #[arg(long)]
    kernel: Option<String>,
    /// Print the disassembly of the kernels.
    #[arg(long)]
    asm: bool,
    /// Run one of the operator's cases on the emulator and print the source lines that executed most; sorted by
    /// instructions, or by another column.
    #[arg(
        long,
        value_name = "COLUMN",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "instructions",
        conflicts_with = "asm"
    )]
    hot: Option<hot::Column>,
    /// Print the configurations that the operator has for tensors such as a=bf16[16,4096], and which one it takes.
    #[arg(long = "tensor", value_name = "NAME=TYPE[SIZES]", conflicts_with_all = ["asm", "hot"])]
    tensors: Vec<Tensor>,
    /// With --tensor: a parameter of the call.
    #[arg(long = "param", value_name = "NAME=VALUE", requires = "tensors", value_parser = run::parameter)]
    params: Vec<(String, String)>,
    /// With --tensor: the device. Default: all emulated GPUs.
    #[arg(long, value_name = "SPEC", requires = "tensors")]
    device: Option<String>,
    /// With --hot: the case, by a part of its name. Default: the first.
    #[arg(long, requires = "hot")]
    case: Option<String>,
    /// With --hot: how many lines of each kernel.
    #[arg(long, requires = "hot", default_value_t = 20)]
    top: usize,
}

/// A tensor of a call: `a=bf16[16,4096]`.
#[derive(Debug, Clone)]
pub struct Tensor {
    name: String,
    spec: TensorSpec,
}

impl FromStr for Tensor {
    type Err = String;

    fn from_str(text: &str) -> Result<Tensor, String> {
        let wrong = || format!("`{text}` is not NAME=TYPE[SIZES], such as a=bf16[16,4096]");
        let (name, rest) = text.split_once('=').ok_or_else(wrong)?;
        let (dtype, sizes) = rest.strip_suffix(']').and_then(|s| s.split_once('[')).ok_or_else(wrong)?;
        let dtype: DType = dtype.parse().map_err(|e: hk_core::Error| e.to_string())?;
        let sizes: Result<Vec<usize>, _> = sizes.split(',').map(|n| n.trim().parse()).collect();
        Ok(Tensor { name: name.into(), spec: TensorSpec::new(dtype, sizes.map_err(|_| wrong())?) })
    }
}

/// A kernel in a code object for a target.
struct Entry {
    arch: Arch,
    image: &'static [u8],
    object: CodeObject,
    kernel: Kernel,
}

pub fn run(args: &Args) -> Result<()> {
    let op = crate::operator(&args.operator)?;
    if let Some(column) = args.hot {
        return print_hot(op, args, column);
    }
    if !args.tensors.is_empty() {
        return print_choices(op, args);
    }
    let entries = entries(op, args)?;
    if args.asm {
        return entries.iter().try_for_each(|e| out::print(disassembly(e)?));
    }
    print_arguments(op)?;
    out::print("")?;
    print_resources(&entries)
}

/// Runs a case on each target and prints the hot lines of its kernels.
fn print_hot(op: &'static Operator, args: &Args, column: hot::Column) -> Result<()> {
    let part = args.case.as_deref().unwrap_or("");
    let case = op.cases.iter().find(|case| case.label.contains(part)).ok_or_else(|| {
        let labels: Vec<_> = op.cases.iter().map(|case| format!("`{}`", case.label)).collect();
        Failure::new(format!("{}: no case `{part}`, expected a part of {}", op.name, labels.join(", ")))
    })?;
    let call = op.example(case, 0)?;
    let targets = args.target.map_or(Arch::AMD.to_vec(), |target| vec![target]);
    for arch in targets {
        let stream = Device::open(&format!("emu:{arch}?details=true"))?.create_stream()?;
        op.execute(&stream, &call)?;
        let mut profiles = stream.take_profiles()?;
        profiles.retain(|p| args.kernel.as_ref().is_none_or(|part| p.kernel.contains(part)));
        out::print(format_args!("{}, {}, on {arch}:\n", op.name, case.label))?;
        hot::print(&profiles, column, args.top)?;
    }
    Ok(())
}

/// The call that --tensor and --param describe.
pub fn described(op: &'static Operator, tensors: &[Tensor], params: &[(String, String)]) -> Result<CallSpec> {
    let mut call = CallSpec::new(op);
    for (i, Tensor { name, spec }) in tensors.iter().enumerate() {
        if tensors[..i].iter().any(|other| other.name == *name) {
            return Err(Failure::new(format!("--tensor {name}: given twice")));
        }
        call.set(name, spec.clone())?;
    }
    run::set_scalars(&mut call, params)?;
    Ok(call)
}

/// The configurations for the tensors given, on each device.
fn print_choices(op: &'static Operator, args: &Args) -> Result<()> {
    let Some((_, choices)) = CHOICES.iter().find(|(family, _)| *family == op.family) else {
        return Err(Failure::new(format!("{}: no configurations to choose from", op.name)));
    };
    let call = described(op, &args.tensors, &args.params)?;
    let devices = match &args.device {
        Some(device) => vec![device.clone()],
        None => Arch::AMD.map(|arch| format!("emu:{arch}")).into(),
    };
    for (i, spec) in devices.iter().enumerate() {
        let device = Device::open(spec)?;
        let rows = choices(&call, device.info())?;
        let names = rows.first().map(|row| row.values.iter().map(|(name, _)| *name)).into_iter().flatten();
        let mut table = Table::new([""].into_iter().chain(names));
        for row in &rows {
            let mark = if row.chosen { "chosen" } else { "" };
            table.row([mark.to_owned()].into_iter().chain(row.values.iter().map(|(_, value)| value.clone())));
        }
        let gap = if i > 0 { "\n" } else { "" };
        let cus = device.info().compute_units;
        out::print(format_args!("{gap}{} on {}, {cus} CUs:\n", op.name, device.spec()))?;
        table.print()?;
    }
    Ok(())
}

fn entries(op: &Operator, args: &Args) -> Result<Vec<Entry>> {
    let targets: Vec<Arch> = match args.target {
        Some(target) => vec![target],
        None => Arch::ALL.into_iter().filter(|a| op.kernels.iter().any(|k| k.image(*a).is_ok())).collect(),
    };
    let mut entries = Vec::new();
    for objects in op.kernels {
        if targets.is_empty() {
            objects.image(Arch::Gfx942)?; // says why there is none
        }
        for &arch in &targets {
            entries.extend(kernels(objects, arch)?);
        }
    }
    if let Some(part) = &args.kernel {
        entries.retain(|e| e.kernel.name.contains(part));
        if entries.is_empty() {
            return Err(Failure::new(format!("{}: no kernel's name contains `{part}`", op.name)));
        }
    }
    Ok(entries)
}

fn kernels(objects: &'static CodeObjects, arch: Arch) -> Result<Vec<Entry>> {
    let image = objects.image(arch)?;
    if !arch.is_amd() {
        return Err(Failure::new(format!("{}: {arch} is PTX, which has no registers yet", objects.name())));
    }
    let wrong =
        |e: &dyn std::fmt::Display| Failure::new(format!("code object {}: {arch}: {e}", objects.name()));
    let object = CodeObject::parse(image).map_err(|e| wrong(&e))?;
    let kernels = object.kernels.clone();
    Ok(kernels.into_iter().map(|kernel| Entry { arch, image, object: object.clone(), kernel }).collect())
}

fn print_arguments(op: &Operator) -> Result<()> {
    out::print(format_args!("{} ({}): {}\n", op.name, op.family, op.summary))?;
    let mut table = Table::new(["tensor", "", "shape", "element types"]);
    for arg in op.args {
        let optional = if arg.optional { ", optional" } else { "" };
        let role = format!("{}{optional}", list::role(arg.role));
        table.row([arg.name.into(), role, arg.shape.into(), list::dtypes(arg.dtypes)]);
    }
    table.print()?;
    out::print("")?;
    let mut table = Table::new(["parameter", "default", "values", "meaning"]);
    for scalar in op.scalars {
        let default = scalar.default.to_string();
        table.row([scalar.name.into(), default, list::values(scalar), scalar.summary.into()]);
    }
    table.print()
}

fn print_resources(entries: &[Entry]) -> Result<()> {
    let mut table = Table::new([
        "kernel",
        "target",
        ">threads",
        ">VGPR",
        ">AGPR",
        ">SGPR",
        ">LDS B",
        ">scratch B",
        ">spills",
        ">waves/SIMD",
    ]);
    for Entry { arch, kernel, .. } in entries {
        let name = kernel.name.clone();
        let numbers = [
            kernel.max_threads,
            kernel.vgprs,
            kernel.agprs,
            kernel.sgprs,
            kernel.lds_bytes,
            kernel.scratch_bytes,
            kernel.vgpr_spills + kernel.sgpr_spills,
            kernel.occupancy(*arch),
        ];
        let [threads, vgpr, agpr, sgpr, lds, scratch, spills, occupancy] = numbers.map(|n| n.to_string());
        table.row([name, arch.to_string(), threads, vgpr, agpr, sgpr, lds, scratch, spills, occupancy]);
    }
    table.print()
}

/// The instructions of a kernel, each with its address and dwords, a branch with its target, and the source lines that
/// they come from. An unknown instruction is its dword alone.
fn disassembly(entry: &Entry) -> Result<String> {
    let Entry { arch, kernel, image, .. } = entry;
    let code = code(entry)?;
    let lines = lines(image);
    let mut text = format!("{} for {arch}, {} bytes:\n", kernel.name, code.len());
    let dwords: Vec<u32> =
        code.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let (mut at, mut source) = (0, None);
    while at < dwords.len() {
        let address = kernel.entry_vaddr + 4 * at as u64;
        let line = lines.as_ref().and_then(|lines| line(lines, address));
        if line.is_some() && line != source {
            let _ = writeln!(text, "  ; {}", line.as_deref().unwrap_or_default());
            source = line;
        }
        let (length, instruction, target) = match isa::decode(*arch, &dwords[at..]) {
            Ok(inst) => {
                let length = usize::from(inst.size / 4).max(1);
                (length, isa::display(&inst).to_string(), target(&inst, address))
            }
            Err(_) => (1, format!(".long {:#010x}", dwords[at]), None),
        };
        let bytes: Vec<_> =
            dwords[at..dwords.len().min(at + length)].iter().map(|w| format!("{w:08X}")).collect();
        let target = target.map_or(String::new(), |t| format!(" -> {t:06X}"));
        let _ = writeln!(text, "    {instruction:<60} // {address:06X}: {}{target}", bytes.join(" "));
        at += length;
    }
    text.pop();
    Ok(text)
}

/// Where a branch leads: its immediate counts dwords from the next instruction.
fn target(inst: &isa::Inst, address: u64) -> Option<u64> {
    let name = inst.op.info().name;
    let relative = name.starts_with("S_BRANCH") || name.starts_with("S_CBRANCH");
    relative.then(|| address.wrapping_add_signed(4 + 4 * i64::from(inst.imm as i16)))
}

type Lines<'a> = addr2line::Context<gimli::EndianSlice<'a, gimli::LittleEndian>>;

/// The line table of a code object, if it has one.
fn lines(image: &[u8]) -> Option<Lines<'_>> {
    let elf = object::read::elf::ElfFile64::<object::LittleEndian>::parse(image).ok()?;
    let load = |id: gimli::SectionId| -> Result<_, gimli::Error> {
        let data = elf.section_by_name(id.name()).and_then(|s| s.data().ok()).unwrap_or_default();
        Ok(gimli::EndianSlice::new(data, gimli::LittleEndian))
    };
    addr2line::Context::from_dwarf(gimli::Dwarf::load(load).ok()?).ok()
}

/// `file:line` of an address.
fn line(lines: &Lines, address: u64) -> Option<String> {
    let location = lines.find_location(address).ok()??;
    Some(format!("{}:{}", location.file?, location.line?))
}

/// The bytes of a kernel's function, as its symbol delimits them.
fn code(entry: &Entry) -> Result<&'static [u8]> {
    let Entry { image, object, kernel, .. } = entry;
    let wrong = |what: &str| Failure::new(format!("kernel {}: {what}", kernel.name));
    let elf = object::read::elf::ElfFile64::<object::LittleEndian>::parse(*image)?;
    let function =
        elf.symbols().find(|s| s.address() == kernel.entry_vaddr && s.size() > 0 && s.is_definition());
    let size = function.ok_or_else(|| wrong("no symbol of its function"))?.size();
    let segment = object.segments.iter().find(|s| {
        let end = s.vaddr.saturating_add(s.file.len() as u64);
        (s.vaddr..end).contains(&kernel.entry_vaddr) && size <= end - kernel.entry_vaddr
    });
    let segment = segment.ok_or_else(|| wrong("its function lies outside of the file"))?;
    let start = segment.file.start + (kernel.entry_vaddr - segment.vaddr) as usize;
    image.get(start..start + size as usize).ok_or_else(|| wrong("its function lies outside of the file"))
}
