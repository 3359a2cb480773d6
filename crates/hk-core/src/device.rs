//! Devices and how they are found.

use crate::driver::Driver;
use crate::drivers;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::host::HostBuffer;
use crate::module::{LoadedKernel, Modules};
use crate::stream::Stream;
use hk_codeobj::Arch;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// A GPU, or the emulator of one. Cheap to clone.
///
/// | string | device |
/// |---|---|
/// | `emu:gfx942`, `emu:gfx950` | the emulator (feature `emu`, on by default) |
/// | `emu:gfx942:N` | emulated GPU number N (0 to 15) of one host: [`enable_peer_access`](Device::enable_peer_access) |
/// | `hip:N` | AMD GPU number N through the ROCm runtime (feature `hip`) |
/// | `cuda:N` | NVIDIA GPU number N, Hopper or later, for measuring (feature `cuda`; kernels built with `HK_TARGETS` naming `sm_90`, or for Hopper `sm_90a`) |
///
/// The emulator takes options, `emu:gfx942?threads=1&budget=1000000`:
///
/// | option | meaning |
/// |---|---|
/// | `threads=N` | host threads per launch (default: all) |
/// | `cus=N` | compute units that the device says it has: with few, kernels that loop over their work do so at small sizes |
/// | `budget=N` | instructions after which a wave is stopped as endless |
/// | `details=BOOL` | count what depends on addresses: [`Counters::details`](crate::Counters::details), and by source line: [`Stream::take_profiles`] |
/// | `blocks=BOOL` | with `details=true`: count each block by itself, too, [`Profile::blocks`](crate::Profile::blocks) |
/// | `time=PART` | events and `Stream::take_launches` have the modelled time of launches on `mi300x`, `mi308x`, `mi325x`, `mi350x` or `mi355x` (feature `time`) |
/// | `sampled=BOOL` | with `time`: launches are modelled and not executed, so that a launch of any size takes seconds; outputs are not computed |
/// | `misaligned=BOOL` | let global accesses be misaligned, as the hardware does |
/// | `skew=N` | modelled clocks that a wave may be ahead of the others of its workgroup when it accesses LDS (default: 16; under `sanitize=lds` and `=global` 262144): only kernels with races give other results |
/// | `sanitize=NAMES` | checks that every launch runs under: `all`, or names as of [`Checks`](crate::Checks) with `,` or `+` between; the default is what the environment variable `HK_SANITIZE` names, else none |
/// | `mfma=fma`, `mfma=cdna3-exact` | how matrix instructions round, in place of the environment variable `HK_MFMA` |
/// | `node=NAME` | of a device with a number: the emulated host that it is in; devices of two hosts have nothing to do with each other |
/// | `patience_ms=N` | time after which launches that only wait for memory are reported as a deadlock (default: 1000; with a number 10000) |
/// | `delay_ms=N` | pause before each piece of queued work, so that tests meet real asynchrony |
///
/// ```
/// # fn main() -> hk_core::Result<()> {
/// let device = hk_core::Device::open("emu:gfx942")?;
/// let stream = device.create_stream()?;
/// let x = stream.upload(&[1.0f32, 2.0, 3.0])?;
/// assert_eq!(stream.download(&x)?, [1.0, 2.0, 3.0]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    /// Never given twice, unlike an address.
    id: u64,
    driver: Box<dyn Driver>,
    modules: Modules,
    /// Devices whose memory its kernels can access, by `id`.
    peers: Mutex<Vec<u64>>,
}

/// What a device is and what it has.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The string that opens it.
    pub spec: String,
    /// Marketing name, or the emulator's.
    pub name: String,
    /// The target that its kernels are compiled for.
    pub arch: Arch,
    /// Compute units.
    pub compute_units: u32,
    /// Lanes of a wave.
    pub wave_size: u32,
    /// LDS that one block can have, in bytes.
    pub lds_per_workgroup: u32,
    /// Threads that one block can have.
    pub max_threads_per_workgroup: u32,
    /// Blocks that a grid can have along x, y and z.
    pub max_grid: [u32; 3],
    /// Memory in bytes; on the emulator that of the part (MI300X, MI350X), of which the host lends what is allocated.
    pub total_memory_bytes: u64,
    /// `emu`, `hip` or `cuda`.
    pub driver: &'static str,
}

impl DeviceInfo {
    /// The largest grid of persistent blocks. `waves_per_cu`: waves of 64 lanes per CU that saturate memory.
    ///
    /// On AMD GPUs just those waves: more cost only their launch. NVIDIA GPUs do better with many short blocks, so there it is eight
    /// times as many.
    pub fn max_blocks(&self, threads: usize, waves_per_cu: usize) -> usize {
        let rounds = if self.arch.is_amd() { 1 } else { 8 };
        (rounds * self.compute_units as usize * waves_per_cu).div_ceil(threads.div_ceil(64)).max(1)
    }

    /// Blocks for a number of independent tasks: on AMD GPUs at most [`max_blocks`](Self::max_blocks), with tasks evenly distributed;
    /// on NVIDIA GPUs one per task, which kernels rely on there (`hk::kPersistentBlocks`).
    pub fn blocks_for(&self, tasks: usize, threads: usize, waves_per_cu: usize) -> usize {
        let tasks = tasks.max(1);
        let most = if self.arch.is_amd() { self.max_blocks(threads, waves_per_cu) } else { tasks };
        tasks.div_ceil(tasks.div_ceil(most))
    }
}

/// The environment variable that [`Device::open_default`] looks at.
const HK_DEVICE: &str = "HK_DEVICE";

impl Device {
    /// Opens a device by its string. While a device is alive, opening its string again gives the same one.
    ///
    /// # Errors
    /// [`Error::Argument`] for a string that is none of the above, [`Error::NoDevice`] if no device answers or its
    /// driver is not built in, [`Error::Driver`] if the driver fails.
    pub fn open(spec: &str) -> Result<Self> {
        static OPEN: OnceLock<Mutex<HashMap<String, Weak<Inner>>>> = OnceLock::new();
        let mut open = OPEN.get_or_init(Default::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(inner) = open.get(spec).and_then(Weak::upgrade) {
            return Ok(Self(inner));
        }
        open.retain(|_, inner| inner.strong_count() > 0);
        let device = Self::open_apart(spec)?;
        open.insert(spec.to_owned(), Arc::downgrade(&device.0));
        Ok(device)
    }

    /// Opens a device that no other call gives: [`loaded_kernels`](Self::loaded_kernels) are those of its own streams alone.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn open_apart(spec: &str) -> Result<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let (driver, id) = (drivers::open(spec)?, NEXT_ID.fetch_add(1, Ordering::Relaxed));
        Ok(Self(Arc::new(Inner { id, driver, modules: Modules::default(), peers: Mutex::default() })))
    }

    /// Opens what the environment variable `HK_DEVICE` names, else the first AMD GPU, else `emu:gfx942`.
    ///
    /// # Errors
    /// As [`Device::open`]; a device that `HK_DEVICE` names is never replaced by another.
    pub fn open_default() -> Result<Self> {
        match std::env::var(HK_DEVICE) {
            Ok(spec) => Self::open(&spec),
            Err(std::env::VarError::NotUnicode(got)) => {
                let want = "a device string, as emu:gfx942 or hip:0";
                Err(Error::argument("Device::open_default", HK_DEVICE, format!("{got:?}"), want))
            }
            Err(std::env::VarError::NotPresent) => match Self::open("hip:0") {
                Err(Error::NoDevice { .. }) => Self::open("emu:gfx942"),
                other => other,
            },
        }
    }

    /// Every device that could be opened, with what it is or why it does not answer: all emulated targets, all AMD
    /// GPUs, or the one reason why there is none.
    pub fn available() -> Vec<(String, Result<DeviceInfo>)> {
        let specs = drivers::specs();
        specs.into_iter().map(|spec| (spec.clone(), Self::open(&spec).map(|d| d.info().clone()))).collect()
    }

    /// What it is and has.
    pub fn info(&self) -> &DeviceInfo {
        self.0.driver.info()
    }

    /// The target that its kernels are compiled for.
    pub fn arch(&self) -> Arch {
        self.info().arch
    }

    /// The string that opened it.
    pub fn spec(&self) -> &str {
        &self.info().spec
    }

    /// A new queue of work.
    ///
    /// # Errors
    /// [`Error::Driver`] if the driver fails.
    pub fn create_stream(&self) -> Result<Stream> {
        Stream::new(self)
    }

    /// `len` zeros in page-locked host memory, for copies that the host does not wait for.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the size does not fit an `i64`; [`Error::Driver`] or [`Error::Emulator`] if there is not
    /// enough memory.
    pub fn alloc_host<T: Element>(&self, len: usize) -> Result<HostBuffer<T>> {
        HostBuffer::new(self, len)
    }

    /// Whether kernels of this device could access the memory of `peer`.
    ///
    /// # Errors
    /// [`Error::Driver`] if the driver fails.
    pub fn can_access_peer(&self, peer: &Device) -> Result<bool> {
        Ok(self.peer_problem(peer)?.is_none())
    }

    /// Lets kernels of this device access what [`Stream::alloc_shared`] allocates on `peer`, in this direction only. To enable it again, or
    /// for the device itself, is nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the devices have no such access, [`Error::Driver`].
    pub fn enable_peer_access(&self, peer: &Device) -> Result<()> {
        if self.reaches(peer) {
            return Ok(());
        }
        if let Some(reason) = self.peer_problem(peer)? {
            let what = format!("access of {} to the memory of {}", self.spec(), peer.spec());
            return Err(Error::Unsupported { op: "Device::enable_peer_access", what, reason });
        }
        self.driver().enable_peer_access(peer.driver())?;
        self.0.peers.lock().unwrap_or_else(PoisonError::into_inner).push(peer.id());
        Ok(())
    }

    /// Why there is no peer access.
    fn peer_problem(&self, peer: &Device) -> Result<Option<String>> {
        if self == peer {
            return Ok(None);
        }
        if self.info().driver != peer.info().driver {
            return Ok(Some("they are devices of two drivers".into()));
        }
        Ok(self.driver().can_access_peer(peer.driver())?.err())
    }

    /// Whether kernels can access the memory of that device.
    pub(crate) fn reaches(&self, other: &Device) -> bool {
        self == other || self.0.peers.lock().unwrap_or_else(PoisonError::into_inner).contains(&other.id())
    }

    /// The kernels that were asked for on this device since it was opened, by name: what an operator really runs.
    pub fn loaded_kernels(&self) -> Vec<Arc<LoadedKernel>> {
        let mut kernels = self.modules().kernels();
        kernels.sort_by(|a, b| a.name().cmp(b.name()));
        kernels
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        &*self.0.driver
    }

    pub(crate) fn modules(&self) -> &Modules {
        &self.0.modules
    }

    /// Tells devices apart.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    pub(crate) fn expect_same(&self, op: &'static str, arg: &'static str, other: &Device) -> Result<()> {
        if self == other {
            return Ok(());
        }
        Err(Error::DeviceMismatch { op, arg, got: other.spec().into(), want: self.spec().into() })
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.spec())
    }
}
