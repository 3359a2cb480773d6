//! `hk exec`.

mod arg;

use crate::out::{self, Table};
use crate::{Failure, Result, time};
use arg::{Arg, Output, Value};
use hk_codeobj::{Arch, CodeObject, Kernel};
use hk_emu::{Checks, Clocks, Costs, Counters, Dispatch, Machine, MachineOptions, MatrixNumerics};
use hk_time::launch::Launch;
use hk_time::model::Options;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::Serialize;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

const NOTATION: &str = "\
Arguments, in the order of the kernel's list (--list prints it), or each where @OFFSET= says:
  i32:5, u64:0x10, f32:-0.5    a scalar: i8 to i64, u8 to u64, f16, bf16, f32, f64
  FILE#NAME, #NAME             the address of a tensor of a safetensors file, or of the one of --in
  inout:FILE#NAME              the same, and it is an output, too
  out:NAME=bf16[128,4096]      the address of a new buffer, an output. Its type is one of safetensors'. It holds the
                               emulator's poison; with `,zero` behind it zeros, with `,fill=0x7f` this byte
  hex:00ff                     bytes
  at:#x;#y;u64:5               the address of a new buffer with such values behind each other, as tables of pointers are
  null                         a null pointer
A tensor or an output that is named twice is one buffer. The bytes between arguments are zero.

Example: y = 2 x by a kernel with the parameters (const float *x, float *y, float factor, int n)
  hk exec scale.co --grid 4 --block 256 --in in.safetensors --out out.safetensors \\
      --arg '#x' --arg 'out:y=f32[1000]' --arg f32:2 --arg i32:1000";

/// Options of `hk exec`.
#[derive(Debug, clap::Args)]
#[command(after_help = NOTATION)]
pub struct Args {
    /// The code object: a linked ELF file for gfx942 or gfx950.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// List the file's kernels and their arguments.
    #[arg(long, conflicts_with_all = ["grid", "block", "args", "args_file", "output"])]
    list: bool,
    /// The kernel. May be left out if the file has only one.
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Workgroups.
    #[arg(long, value_name = "X[,Y[,Z]]", value_parser = extent, required_unless_present = "list")]
    grid: Option<[u32; 3]>,
    /// Threads of a workgroup.
    #[arg(long, value_name = "X[,Y[,Z]]", value_parser = extent, required_unless_present = "list")]
    block: Option<[u32; 3]>,
    /// LDS beyond the kernel's own, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    dynamic_lds: u32,
    /// An argument of the kernel; see below.
    #[arg(long = "arg", value_name = "[@OFFSET=]ARG")]
    args: Vec<Arg>,
    /// A JSON file with a list of arguments, each a string as for --arg; they go before those of --arg.
    #[arg(long = "args", value_name = "FILE")]
    args_file: Option<PathBuf>,
    /// Put each argument at the next multiple of so many bytes, whatever the kernel's list says: 16 for the usual
    /// hand-written kernels.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=4096))]
    slot: Option<u32>,
    /// The safetensors file of tensors that name no file.
    #[arg(long = "in", value_name = "FILE")]
    input: Option<PathBuf>,
    /// The safetensors file for the outputs.
    #[arg(long = "out", value_name = "FILE")]
    output: Option<PathBuf>,
    /// Let global accesses be misaligned, as the hardware does. Else they are errors.
    #[arg(long)]
    allow_misaligned: bool,
    /// Modelled clocks that a wave may be ahead of the others of its workgroup when it accesses LDS (default: 16, about in
    /// step). Only kernels with races between waves give other results.
    #[arg(long, value_name = "CLOCKS")]
    skew: Option<u64>,
    /// How matrix instructions add up: `fma` or `cdna3-exact`.
    #[arg(long, value_name = "NAME")]
    numerics: Option<MatrixNumerics>,
    /// Run with the emulator's sanitizers: all, or those named, with commas between.
    #[arg(long, value_name = "NAMES", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    sanitize: Option<Checks>,
    /// Print what was executed.
    #[arg(long)]
    stats: bool,
    /// Model the time and what bounds it, besides.
    #[arg(long)]
    time: bool,
    #[command(flatten)]
    shown: time::Shown,
    /// Print it as JSON.
    #[arg(long)]
    json: bool,
}

/// `X`, `X,Y` or `X,Y,Z`; what is left out is 1.
fn extent(text: &str) -> Result<[u32; 3], String> {
    let mut all = [1; 3];
    let parts: Vec<_> = text.split(',').collect();
    if parts.len() > all.len() {
        return Err("expected X, X,Y or X,Y,Z".into());
    }
    for (n, part) in all.iter_mut().zip(parts) {
        *n = part.trim().parse().map_err(|_| format!("`{part}` is not a number"))?;
    }
    Ok(all)
}

pub fn run(args: &Args) -> Result<()> {
    let image = fs::read(&args.file).map_err(|e| Failure::file(&args.file, e))?;
    let object = CodeObject::parse(&image).map_err(|e| Failure::file(&args.file, e))?;
    if args.list {
        return list(&object, args.kernel.as_deref(), args.json);
    }
    let (Some(grid), Some(block)) = (args.grid, args.block) else {
        return Err(Failure::new("--grid and --block are needed"));
    };
    let kernel = kernel(&object, args)?;
    let mut given = match &args.args_file {
        Some(path) => arguments(path)?,
        None => Vec::new(),
    };
    given.extend(args.args.iter().cloned());

    let options = MachineOptions::default()
        .arch(object.arch)
        .allow_misaligned(args.allow_misaligned)
        .matrix_numerics(args.numerics.unwrap_or_default())
        .sanitize(args.sanitize.unwrap_or_default())
        .skew(args.skew)
        .details(args.stats || args.json);
    let machine = Machine::new(options);
    let module = machine.load(&image).map_err(|e| Failure::file(&args.file, e))?;
    let mut buffers = Buffers::new(&machine, args.input.as_deref());
    let bytes = segment(kernel, args.slot, &given, &mut buffers)?;
    let dispatch = Dispatch { grid, block, dynamic_lds: args.dynamic_lds, args: &bytes };
    if args.time {
        let part = args.shown.part_of(object.arch)?;
        let launch = Launch::new(part, &machine, &module, &kernel.name, &dispatch, Options::default())
            .map_err(|why| Failure::new(format!("kernel {}: {why}", kernel.name)))?;
        args.shown.print(part, &[Ok(launch)])?;
    } else {
        args.shown.expect_none()?;
    }
    let counters = machine.launch(&module, &kernel.name, &dispatch)?;
    if let Some(path) = &args.output {
        buffers.write(path, &kernel.name)?;
    }
    if args.json {
        let clocks = Costs::of(object.arch).clocks(&counters);
        let target = object.arch.name();
        out::json(&Executed { kernel: &kernel.name, target, grid, block, clocks, counters })
    } else if args.stats {
        out::executed(&counters).print()
    } else {
        Ok(())
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Executed<'a> {
    kernel: &'a str,
    target: &'a str,
    grid: [u32; 3],
    block: [u32; 3],
    clocks: Clocks,
    #[serde(flatten)]
    counters: Counters,
}

fn kernel<'a>(object: &'a CodeObject, args: &Args) -> Result<&'a Kernel> {
    let names = || object.kernels.iter().map(|k| &*k.name).collect::<Vec<_>>().join(", ");
    match (&args.kernel, &object.kernels[..]) {
        (Some(name), _) => object.kernel(name).ok_or_else(|| {
            let text = format!("no kernel `{name}`, expected one of {}", names());
            Failure::file(&args.file, text)
        }),
        (None, [only]) => Ok(only),
        (None, []) => Err(Failure::file(&args.file, "it has no kernel")),
        (None, _) => Err(Failure::file(&args.file, format_args!("choose one with --kernel: {}", names()))),
    }
}

/// The arguments of a JSON file.
fn arguments(path: &Path) -> Result<Vec<Arg>> {
    let text = fs::read(path).map_err(|e| Failure::file(path, e))?;
    let list: Vec<String> = serde_json::from_slice(&text)
        .map_err(|e| Failure::file(path, format_args!("not a JSON list of strings: {e}")))?;
    let parse = |text: String| text.parse().map_err(|e| Failure::file(path, format_args!("`{text}`: {e}")));
    list.into_iter().map(parse).collect()
}

/// The bytes of the argument segment; makes the buffers that arguments point to.
fn segment(kernel: &Kernel, slot: Option<u32>, args: &[Arg], buffers: &mut Buffers) -> Result<Vec<u8>> {
    let wrong = |text| Failure::new(format!("kernel {}: {text}", kernel.name));
    let (total, places) = arg::layout(kernel, slot, args).map_err(wrong)?;
    let mut bytes = vec![0; total as usize];
    for (arg, place) in args.iter().zip(places) {
        let value = buffers.value(&arg.value)?;
        let place = place as usize;
        bytes[place..place + value.len()].copy_from_slice(&value);
    }
    Ok(bytes)
}

/// A buffer that arguments point to.
struct Buffer {
    /// The file that it came from.
    file: Option<PathBuf>,
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    address: u64,
    bytes: usize,
    output: bool,
}

/// The buffers of a launch.
struct Buffers<'a> {
    machine: &'a Machine,
    input: Option<&'a Path>,
    files: HashMap<PathBuf, Vec<u8>>,
    all: Vec<Buffer>,
}

impl<'a> Buffers<'a> {
    fn new(machine: &'a Machine, input: Option<&'a Path>) -> Self {
        Buffers { machine, input, files: HashMap::new(), all: Vec::new() }
    }

    /// The bytes of a value; makes the buffers that it points to.
    fn value(&mut self, value: &Value) -> Result<Vec<u8>> {
        let address = match value {
            Value::Bytes(bytes) => return Ok(bytes.clone()),
            Value::Tensor { file, name, output } => self.tensor(file.as_deref(), name, *output)?,
            Value::Output(output) => self.output(output)?,
            Value::Table(values) => {
                let values = values.iter().map(|v| self.value(v)).collect::<Result<Vec<_>>>()?.concat();
                let address = self.machine.alloc(values.len() as u64, 256, "table")?;
                self.machine.write(address, &values)?;
                address
            }
        };
        Ok(address.to_le_bytes().into())
    }

    /// The address of a tensor of a file, uploaded when it is first named.
    fn tensor(&mut self, file: Option<&Path>, name: &str, output: bool) -> Result<u64> {
        let Some(path) = file.or(self.input) else {
            return Err(Failure::new(format!("#{name}: which file? Say FILE#{name} or --in FILE")));
        };
        let known = |b: &&mut Buffer| b.file.as_deref() == Some(path) && b.name == name;
        if let Some(buffer) = self.all.iter_mut().find(known) {
            buffer.output |= output;
            return Ok(buffer.address);
        }
        if !self.files.contains_key(path) {
            let bytes = fs::read(path).map_err(|e| Failure::file(path, e))?;
            self.files.insert(path.into(), bytes);
        }
        let tensors = SafeTensors::deserialize(&self.files[path])
            .map_err(|e| Failure::file(path, format_args!("not a safetensors file: {e}")))?;
        let view = tensors.tensor(name).map_err(|_| {
            let mut names = tensors.names();
            names.sort_unstable();
            Failure::file(path, format_args!("no tensor `{name}`; it has {}", names.join(", ")))
        })?;
        let address = self.machine.alloc(view.data().len() as u64, 256, name)?;
        self.machine.write(address, view.data())?;
        let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().len());
        let (file, name) = (Some(path.to_owned()), name.to_owned());
        self.all.push(Buffer { file, name, dtype, shape, address, bytes, output });
        Ok(address)
    }

    /// The address of a new output, or of the one that is named again.
    fn output(&mut self, new: &Output) -> Result<u64> {
        let Output { name, dtype, shape, fill } = new;
        if let Some(b) = self.all.iter().find(|b| b.file.is_none() && b.name == *name) {
            if (b.dtype, &b.shape) != (*dtype, shape) {
                return Err(Failure::new(format!("output `{name}` has two types or shapes")));
            }
            return Ok(b.address);
        }
        let bytes = new.bytes().ok_or_else(|| Failure::new(format!("output `{name}` is too large")))?;
        let address = self.machine.alloc(bytes as u64, 256, name)?;
        if let Some(byte) = fill {
            self.machine.fill(address, &[*byte], bytes as u64)?;
        }
        let (name, shape) = (name.clone(), shape.clone());
        self.all.push(Buffer { file: None, name, dtype: *dtype, shape, address, bytes, output: true });
        Ok(address)
    }

    /// Writes the outputs to a file.
    fn write(&self, path: &Path, kernel: &str) -> Result<()> {
        let mut data: Vec<(&Buffer, Vec<u8>)> = Vec::new();
        for buffer in self.all.iter().filter(|b| b.output) {
            if data.iter().any(|(other, _)| other.name == buffer.name) {
                return Err(Failure::new(format!("two outputs are named `{}`", buffer.name)));
            }
            let mut bytes = vec![0; buffer.bytes];
            self.machine.read(buffer.address, &mut bytes)?;
            data.push((buffer, bytes));
        }
        let views = data
            .iter()
            .map(|(b, bytes)| Ok((&*b.name, TensorView::new(b.dtype, b.shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        let about = [("format", "pt"), ("kernel", kernel)].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let file = safetensors::serialize(views, Some(about.into())).map_err(|e| Failure::file(path, e))?;
        fs::write(path, file).map_err(|e| Failure::file(path, e))
    }
}

/// What `--list --json` prints.
#[derive(Serialize)]
struct Listed<'a> {
    kernel: &'a str,
    target: &'a str,
    argument_bytes: u32,
    arguments: Vec<Argument<'a>>,
    max_threads: u32,
    workgroup: Option<[u32; 3]>,
    vgprs: u32,
    agprs: u32,
    sgprs: u32,
    lds_bytes: u32,
    scratch_bytes: u32,
}

#[derive(Serialize)]
struct Argument<'a> {
    name: Option<&'a str>,
    kind: &'a str,
    offset: u32,
    bytes: u32,
}

impl<'a> Listed<'a> {
    fn new(arch: Arch, k: &'a Kernel) -> Self {
        let arguments = k.args.iter().filter(|arg| !arg.hidden()).map(|arg| Argument {
            name: arg.name.as_deref(),
            kind: &arg.kind,
            offset: arg.offset,
            bytes: arg.size,
        });
        Listed {
            kernel: &k.name,
            target: arch.name(),
            argument_bytes: k.explicit_arg_bytes,
            arguments: arguments.collect(),
            max_threads: k.max_threads,
            workgroup: k.reqd_workgroup_size,
            vgprs: k.vgprs,
            agprs: k.agprs,
            sgprs: k.sgprs,
            lds_bytes: k.lds_bytes,
            scratch_bytes: k.scratch_bytes,
        }
    }
}

fn list(object: &CodeObject, name: Option<&str>, json: bool) -> Result<()> {
    let kernels = object.kernels.iter().filter(|k| name.is_none_or(|name| k.name.contains(name)));
    let all: Vec<_> = kernels.map(|k| Listed::new(object.arch, k)).collect();
    if json {
        return out::json(&all);
    }
    for k in &all {
        out::print(format_args!(
            "{} for {}: {} bytes of arguments, up to {} threads, {} VGPRs, {} AGPRs, {} SGPRs, {} of LDS",
            k.kernel,
            k.target,
            k.argument_bytes,
            k.max_threads,
            k.vgprs,
            k.agprs,
            k.sgprs,
            out::bytes(k.lds_bytes.into())
        ))?;
        let mut table = Table::new([">offset", ">bytes", "argument", "kind"]);
        for arg in &k.arguments {
            let name = arg.name.unwrap_or("-").into();
            table.row([arg.offset.to_string(), arg.bytes.to_string(), name, arg.kind.into()]);
        }
        if !k.arguments.is_empty() {
            table.print()?;
        }
    }
    Ok(())
}
