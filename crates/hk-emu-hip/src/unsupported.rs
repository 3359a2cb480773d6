//! The rest of what `libamdhip64` exports, so that programs that refer to it can be linked and started.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use half::f16;

use crate::error::{HipError, Result};
use crate::host::put_if;
use crate::memory;
use crate::runtime::{call, say, some_device};

/// Says once that a function is missing.
fn tell(told: &AtomicBool, name: &str) {
    if !told.swap(true, Relaxed) {
        say!("{name} is not supported");
    }
}

/// Exported functions that do nothing but return `hipErrorNotSupported`.
macro_rules! unsupported {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> c_int {
                static TOLD: AtomicBool = AtomicBool::new(false);
                tell(&TOLD, stringify!($name));
                not_supported()
            }
        )*

        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

fn not_supported() -> c_int {
    call(|| some_device().and(Err(HipError::NOT_SUPPORTED)))
}

#[rustfmt::skip] // a list
unsupported! {
    hipArray3DCreate hipArray3DGetDescriptor hipArrayCreate hipArrayGetDescriptor hipArrayGetInfo
    hipBindTexture hipBindTexture2D hipBindTextureToArray hipBindTextureToMipmappedArray
    hipCreateSurfaceObject hipCreateTextureObject hipCtxDisablePeerAccess hipCtxEnablePeerAccess
    hipDestroyExternalMemory hipDestroyExternalSemaphore hipDestroySurfaceObject hipDestroyTextureObject
    hipDeviceGetTexture1DLinearMaxWidth hipDrvLaunchKernelEx hipEnableActivityCallback
    hipExternalMemoryGetMappedBuffer hipExternalMemoryGetMappedMipmappedArray hipGLGetDevices hipGetChannelDesc hipGetDriverEntryPoint_spt
    hipGetMipmappedArrayLevel hipGetTextureAlignmentOffset hipGetTextureObjectResourceDesc
    hipGetTextureObjectResourceViewDesc hipGetTextureObjectTextureDesc hipGetTextureReference
    hipGraphAddBatchMemOpNode hipGraphAddExternalSemaphoresSignalNode hipGraphAddExternalSemaphoresWaitNode
    hipGraphBatchMemOpNodeGetParams hipGraphBatchMemOpNodeSetParams hipGraphExecBatchMemOpNodeSetParams
    hipGraphExecExternalSemaphoresSignalNodeSetParams hipGraphExecExternalSemaphoresWaitNodeSetParams
    hipGraphExternalSemaphoresSignalNodeGetParams hipGraphExternalSemaphoresSignalNodeSetParams
    hipGraphExternalSemaphoresWaitNodeGetParams hipGraphExternalSemaphoresWaitNodeSetParams
    hipGraphicsGLRegisterBuffer hipGraphicsGLRegisterImage hipGraphicsMapResources
    hipGraphicsResourceGetMappedPointer hipGraphicsSubResourceGetMappedArray hipGraphicsUnmapResources
    hipGraphicsUnregisterResource hipImportExternalMemory hipImportExternalSemaphore hipInitActivityCallback
    hipLaunchCooperativeKernelMultiDevice
    hipLaunchKernelExC hipLibraryGetKernel hipLibraryGetKernelCount hipLibraryLoadData hipLibraryLoadFromFile
    hipLibraryUnload hipLinkAddData hipLinkAddFile hipLinkComplete hipLinkCreate hipLinkDestroy
    hipMalloc3DArray hipMemAdvise_v2 hipMemGetHandleForAddressRange hipMemMapArrayAsync hipMemPoolExportPointer
    hipMemPoolExportToShareableHandle hipMemPoolImportFromShareableHandle hipMemPoolImportPointer
    hipMemPrefetchAsync_v2 hipMemcpy2DArrayToArray hipMemcpy2DFromArray
    hipMemcpy2DFromArrayAsync_spt hipMemcpy2DFromArray_spt hipMemcpy2DToArray hipMemcpy2DToArrayAsync_spt
    hipMemcpy2DToArray_spt hipMemcpy3DBatchAsync hipMemcpy3DPeer hipMemcpy3DPeerAsync hipMemcpyAtoA
    hipMemcpyAtoD hipMemcpyAtoH hipMemcpyAtoHAsync hipMemcpyBatchAsync hipMemcpyDtoA hipMemcpyFromArray
    hipMemcpyFromArray_spt hipMemcpyHtoA hipMemcpyHtoAAsync hipMemcpyToArray hipMemsetD2D16
    hipMemsetD2D16Async hipMemsetD2D32 hipMemsetD2D32Async hipMemsetD2D8 hipMemsetD2D8Async
    hipMipmappedArrayCreate hipMipmappedArrayDestroy hipMipmappedArrayGetLevel hipModuleGetFunctionCount
    hipModuleGetTexRef hipModuleLaunchCooperativeKernelMultiDevice
    hipModuleLoadFatBinary hipOccupancyAvailableDynamicSMemPerBlock hipRegisterActivityCallback
    hipRegisterApiCallback hipRegisterTracerCallback hipRemoveActivityCallback hipRemoveApiCallback
    hipStreamBatchMemOp hipStreamCopyAttributes hipStreamGetAttribute hipStreamGetId hipStreamSetAttribute
    hipStreamWaitValue32 hipStreamWaitValue64 hipStreamWriteValue32 hipStreamWriteValue64 hipTexObjectCreate
    hipTexObjectDestroy hipTexObjectGetResourceDesc hipTexObjectGetResourceViewDesc hipTexObjectGetTextureDesc
    hipTexRefGetAddress hipTexRefGetAddressMode hipTexRefGetArray hipTexRefGetBorderColor
    hipTexRefGetFilterMode hipTexRefGetFlags hipTexRefGetFormat hipTexRefGetMaxAnisotropy
    hipTexRefGetMipMappedArray hipTexRefGetMipmapFilterMode hipTexRefGetMipmapLevelBias
    hipTexRefGetMipmapLevelClamp hipTexRefSetAddress hipTexRefSetAddress2D hipTexRefSetAddressMode
    hipTexRefSetArray hipTexRefSetBorderColor hipTexRefSetFilterMode hipTexRefSetFlags hipTexRefSetFormat
    hipTexRefSetMaxAnisotropy hipTexRefSetMipmapFilterMode hipTexRefSetMipmapLevelBias
    hipTexRefSetMipmapLevelClamp hipTexRefSetMipmappedArray hipUnbindTexture
    _Z22hipCreateSurfaceObjectPP13__hip_surfacePK15hipResourceDesc _Z23hipDestroySurfaceObjectP13__hip_surface
}

/// Exported functions that check their arguments before they say that they are not supported.
macro_rules! refused {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $type),*) -> c_int {
                static TOLD: AtomicBool = AtomicBool::new(false);
                call(|| {
                    some_device()?;
                    $body?;
                    tell(&TOLD, stringify!($name));
                    Err(HipError::NOT_SUPPORTED)
                })
            }
        )*

        pub(crate) const REFUSED_NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

fn given(pointers: &[u64], error: HipError) -> Result {
    if pointers.contains(&0) { Err(error) } else { Ok(()) }
}

const INVALID: HipError = HipError::INVALID_VALUE;

refused! {
    fn hipMallocArray(array: u64, description: u64) { given(&[array, description], INVALID) }
    fn hipMallocMipmappedArray(array: u64, description: u64) { given(&[array, description], INVALID) }
    fn hipFreeArray(array: u64) { given(&[array], INVALID) }
    fn hipArrayDestroy(array: u64) { given(&[array], INVALID) }
    fn hipFreeMipmappedArray(array: u64) { given(&[array], INVALID) }
    fn hipMemcpy2DToArrayAsync(dst: u64) { given(&[dst], HipError::INVALID_HANDLE) }
    fn hipMemcpy2DFromArrayAsync(_dst: u64, _pitch: u64, src: u64) { given(&[src], HipError::INVALID_HANDLE) }
    fn hipWaitExternalSemaphoresAsync(list: u64, params: u64) { given(&[list, params], INVALID) }
    fn hipSignalExternalSemaphoresAsync(list: u64, params: u64) { given(&[list, params], INVALID) }

    fn hipPointerSetAttribute(value: u64, attribute: c_int, ptr: u64) {
        const SYNC_MEMOPS: c_int = 6;
        given(&[value, ptr], INVALID).and_then(|()| match attribute {
            SYNC_MEMOPS => memory::known(ptr, HipError::INVALID_DEVICE_POINTER),
            _ => Err(INVALID),
        })
    }
}

/// Functions that return something else than a code.
macro_rules! others {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? $body:block)*) => {
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $type),*) $(-> $result)? $body
        )*

        pub(crate) const OTHER_NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

const UNKNOWN: &CStr = c"unknown";

/// `hipChannelFormatDesc`.
#[repr(C)]
struct ChannelDesc {
    bits: [c_int; 4],
    kind: c_int,
}

others! {
    fn hipApiName(_id: u32) -> *const c_char { UNKNOWN.as_ptr() }
    fn hipGetCmdName(_operation: u32) -> *const c_char { UNKNOWN.as_ptr() }
    fn amd_dbgapi_get_build_name() -> *const c_char { c"hk-emu".as_ptr() }
    fn amd_dbgapi_get_git_hash() -> *const c_char { UNKNOWN.as_ptr() }
    fn amd_dbgapi_get_build_id() -> usize { 0 }

    fn hipCreateChannelDesc(x: c_int, y: c_int, z: c_int, w: c_int, kind: c_int) -> ChannelDesc {
        ChannelDesc { bits: [x, y, z, w], kind }
    }

    /// A precompiled header: there is none.
    fn __hipGetPCH(header: *mut u64, bytes: *mut u32) {
        call(|| {
            put_if(header, 0)?;
            put_if(bytes, 0)
        });
    }

    // Textures and surfaces do not exist; a program may register them and not use them.
    fn __hipRegisterTexture() {}
    fn __hipRegisterSurface() {}

    // What compilers call for `_Float16` where the host has no instructions for it.
    fn __gnu_h2f_ieee(bits: u16) -> f32 { f16::from_bits(bits).to_f32() }
    fn __gnu_f2h_ieee(value: f32) -> u16 { f16::from_f32(value).to_bits() }
}
