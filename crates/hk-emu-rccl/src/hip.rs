//! The HIP runtime of the process: the one that the program uses.

use libloading::os::unix::Library;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*);)*) => {
        /// Its functions that are called here.
        pub(crate) struct Hip {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Hip {
            /// # Safety
            /// The library is the HIP runtime, and stays.
            unsafe fn bind(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the caller's promise.
                unsafe { Ok(Self { $($name: *library.get(stringify!($name))?,)* }) }
            }
        }
    };
}

functions! {
    hipGetDevice: fn(*mut c_int);
    hipSetDevice: fn(c_int);
    hipGetDeviceProperties: fn(*mut c_void, c_int);
    hipMemcpyAsync: fn(*mut c_void, *const c_void, usize, c_int, usize);
    hipStreamCreateWithFlags: fn(*mut usize, c_uint);
    hipStreamDestroy: fn(usize);
    hipStreamSynchronize: fn(*mut c_void);
    hipStreamIsCapturing: fn(*mut c_void, *mut c_int);
    hipLaunchHostFunc: fn(*mut c_void, unsafe extern "C" fn(*mut c_void), *mut c_void);
}

/// `hipMemcpyDefault`: the addresses say which memory they are in.
const DEFAULT: c_int = 4;
/// `hipStreamNonBlocking`: copies on it disturb no capture.
const NON_BLOCKING: c_uint = 1;

/// The runtime, if the process has one.
pub(crate) fn hip() -> Result<&'static Hip, String> {
    static HIP: OnceLock<Result<Hip, String>> = OnceLock::new();
    HIP.get_or_init(|| {
        // SAFETY: these are names of the HIP runtime.
        unsafe {
            if let Ok(hip) = Hip::bind(&Library::this()) {
                return Ok(hip);
            }
            let mut why = String::new();
            for name in ["libamdhip64.so.6", "libamdhip64.so.7", "libamdhip64.so"] {
                match Library::new(name).and_then(|library| {
                    let hip = Hip::bind(&library);
                    std::mem::forget(library);
                    hip
                }) {
                    Ok(hip) => return Ok(hip),
                    Err(error) => why = format!("{error:?}"),
                }
            }
            Err(format!("no HIP runtime: {why}"))
        }
    })
    .as_ref()
    .map_err(Clone::clone)
}

fn check(call: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{call} gives {code}")) }
}

impl Hip {
    /// The current device of this thread.
    pub fn device(&self) -> Result<c_int, String> {
        let mut device = 0;
        // SAFETY: valid for the write.
        check("hipGetDevice", unsafe { (self.hipGetDevice)(&mut device) }).map(|()| device)
    }

    pub fn set_device(&self, device: c_int) -> Result<(), String> {
        // SAFETY: a plain call.
        check("hipSetDevice", unsafe { (self.hipSetDevice)(device) })
    }

    /// Whether the fp8 of a device is that of gfx942.
    pub fn is_gfx942(&self, device: c_int) -> bool {
        // Far larger than any version of the structure, in which the name of the target is somewhere.
        let mut properties = [0u64; 2048];
        // SAFETY: as above.
        let code = unsafe { (self.hipGetDeviceProperties)(properties.as_mut_ptr().cast(), device) };
        let bytes: Vec<u8> = properties.iter().flat_map(|word| word.to_ne_bytes()).collect();
        code == 0 && bytes.windows(6).any(|text| text == b"gfx942")
    }

    pub fn captures(&self, stream: *mut c_void) -> bool {
        let mut status = 0;
        // SAFETY: valid for the write; the runtime knows its streams.
        let code = unsafe { (self.hipStreamIsCapturing)(stream, &mut status) };
        code == 0 && status == 1
    }

    /// Waits for the work of a stream.
    pub fn synchronize(&self, stream: *mut c_void) -> Result<(), String> {
        // SAFETY: the runtime knows its streams.
        check("hipStreamSynchronize", unsafe { (self.hipStreamSynchronize)(stream) })
    }

    /// A stream for [`read`](Self::read) and [`write`](Self::write), on the current device.
    pub fn create_stream(&self) -> Result<usize, String> {
        let mut stream = 0;
        // SAFETY: valid for the write.
        let code = unsafe { (self.hipStreamCreateWithFlags)(&mut stream, NON_BLOCKING) };
        check("hipStreamCreateWithFlags", code).map(|()| stream)
    }

    pub fn destroy_stream(&self, stream: usize) {
        // SAFETY: the runtime knows its streams. There is nobody to tell of a failure.
        unsafe { (self.hipStreamDestroy)(stream) };
    }

    /// Copies from an address. The runtime on the emulator has done it when the call returns.
    pub fn read(&self, stream: usize, addr: u64, out: &mut [u8]) -> Result<(), String> {
        let (dst, src) = (out.as_mut_ptr().cast(), addr as usize as *const c_void);
        // SAFETY: as many bytes; the runtime knows its allocations.
        let code = unsafe { (self.hipMemcpyAsync)(dst, src, out.len(), DEFAULT, stream) };
        check("hipMemcpyAsync of an input", code)
    }

    /// Copies to an address, likewise.
    pub fn write(&self, stream: usize, addr: u64, data: &[u8]) -> Result<(), String> {
        let (dst, src) = (addr as usize as *mut c_void, data.as_ptr().cast());
        // SAFETY: as above.
        let code = unsafe { (self.hipMemcpyAsync)(dst, src, data.len(), DEFAULT, stream) };
        check("hipMemcpyAsync of an output", code)
    }
}
