//! `hipError_t`.

use std::ffi::{CStr, c_int};

/// A code of `hipError_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HipError(pub c_int);

pub(crate) type Result<T = ()> = std::result::Result<T, HipError>;

/// `hipSuccess`.
pub(crate) const SUCCESS: c_int = 0;

macro_rules! codes {
    ($($constant:ident = $code:literal $name:literal: $text:literal,)*) => {
        #[allow(dead_code, reason = "the table is complete")]
        impl HipError {
            $(pub const $constant: HipError = HipError($code);)*
        }

        /// Code, name and meaning.
        const TABLE: &[(c_int, &CStr, &CStr)] = &[$(($code, $name, $text)),*];
    };
}

#[rustfmt::skip] // a table
codes! {
    INVALID_VALUE = 1 c"hipErrorInvalidValue": c"invalid argument",
    OUT_OF_MEMORY = 2 c"hipErrorOutOfMemory": c"out of memory",
    NOT_INITIALIZED = 3 c"hipErrorNotInitialized": c"not initialised",
    DEINITIALIZED = 4 c"hipErrorDeinitialized": c"deinitialised",
    PROFILER_DISABLED = 5 c"hipErrorProfilerDisabled": c"the profiler is disabled",
    PROFILER_NOT_INITIALIZED = 6 c"hipErrorProfilerNotInitialized": c"the profiler is not initialised",
    PROFILER_ALREADY_STARTED = 7 c"hipErrorProfilerAlreadyStarted": c"the profiler runs already",
    PROFILER_ALREADY_STOPPED = 8 c"hipErrorProfilerAlreadyStopped": c"the profiler does not run",
    INVALID_CONFIGURATION = 9 c"hipErrorInvalidConfiguration": c"invalid grid, block or LDS size",
    INVALID_PITCH_VALUE = 12 c"hipErrorInvalidPitchValue": c"invalid pitch",
    INVALID_SYMBOL = 13 c"hipErrorInvalidSymbol": c"no such device variable",
    INVALID_DEVICE_POINTER = 17 c"hipErrorInvalidDevicePointer": c"invalid device pointer",
    INVALID_MEMCPY_DIRECTION = 21 c"hipErrorInvalidMemcpyDirection": c"invalid direction of a copy",
    INSUFFICIENT_DRIVER = 35 c"hipErrorInsufficientDriver": c"the driver is too old",
    MISSING_CONFIGURATION = 52 c"hipErrorMissingConfiguration": c"no launch has been configured",
    PRIOR_LAUNCH_FAILURE = 53 c"hipErrorPriorLaunchFailure": c"an earlier launch failed",
    INVALID_DEVICE_FUNCTION = 98 c"hipErrorInvalidDeviceFunction": c"no such kernel",
    NO_DEVICE = 100 c"hipErrorNoDevice": c"no device",
    INVALID_DEVICE = 101 c"hipErrorInvalidDevice": c"no such device",
    INVALID_IMAGE = 200 c"hipErrorInvalidImage": c"not a code object",
    INVALID_CONTEXT = 201 c"hipErrorInvalidContext": c"invalid context",
    CONTEXT_ALREADY_CURRENT = 202 c"hipErrorContextAlreadyCurrent": c"the context is current already",
    MAP_FAILED = 205 c"hipErrorMapFailed": c"mapping failed",
    UNMAP_FAILED = 206 c"hipErrorUnmapFailed": c"unmapping failed",
    ARRAY_IS_MAPPED = 207 c"hipErrorArrayIsMapped": c"the array is mapped",
    ALREADY_MAPPED = 208 c"hipErrorAlreadyMapped": c"mapped already",
    NO_BINARY_FOR_GPU = 209 c"hipErrorNoBinaryForGpu": c"no code object for this device",
    ALREADY_ACQUIRED = 210 c"hipErrorAlreadyAcquired": c"acquired already",
    NOT_MAPPED = 211 c"hipErrorNotMapped": c"not mapped",
    NOT_MAPPED_AS_ARRAY = 212 c"hipErrorNotMappedAsArray": c"not mapped as an array",
    NOT_MAPPED_AS_POINTER = 213 c"hipErrorNotMappedAsPointer": c"not mapped as a pointer",
    ECC_NOT_CORRECTABLE = 214 c"hipErrorECCNotCorrectable": c"uncorrectable memory error",
    UNSUPPORTED_LIMIT = 215 c"hipErrorUnsupportedLimit": c"unsupported limit",
    CONTEXT_ALREADY_IN_USE = 216 c"hipErrorContextAlreadyInUse": c"the context is in use",
    PEER_ACCESS_UNSUPPORTED = 217 c"hipErrorPeerAccessUnsupported": c"no peer access between these devices",
    INVALID_KERNEL_FILE = 218 c"hipErrorInvalidKernelFile": c"invalid kernel file",
    INVALID_GRAPHICS_CONTEXT = 219 c"hipErrorInvalidGraphicsContext": c"invalid graphics context",
    INVALID_SOURCE = 300 c"hipErrorInvalidSource": c"invalid source",
    FILE_NOT_FOUND = 301 c"hipErrorFileNotFound": c"file not found",
    SHARED_OBJECT_SYMBOL_NOT_FOUND = 302 c"hipErrorSharedObjectSymbolNotFound": c"symbol not found in a shared object",
    SHARED_OBJECT_INIT_FAILED = 303 c"hipErrorSharedObjectInitFailed": c"a shared object failed to initialise",
    OPERATING_SYSTEM = 304 c"hipErrorOperatingSystem": c"the operating system refused",
    INVALID_HANDLE = 400 c"hipErrorInvalidHandle": c"invalid handle",
    ILLEGAL_STATE = 401 c"hipErrorIllegalState": c"not in a state for this operation",
    NOT_FOUND = 500 c"hipErrorNotFound": c"name not found",
    NOT_READY = 600 c"hipErrorNotReady": c"not done yet",
    ILLEGAL_ADDRESS = 700 c"hipErrorIllegalAddress": c"a kernel accessed memory that it must not",
    LAUNCH_OUT_OF_RESOURCES = 701 c"hipErrorLaunchOutOfResources": c"a launch asks for more than the device has",
    LAUNCH_TIME_OUT = 702 c"hipErrorLaunchTimeOut": c"a kernel ran too long",
    PEER_ACCESS_ALREADY_ENABLED = 704 c"hipErrorPeerAccessAlreadyEnabled": c"peer access is enabled already",
    PEER_ACCESS_NOT_ENABLED = 705 c"hipErrorPeerAccessNotEnabled": c"peer access is not enabled",
    SET_ON_ACTIVE_PROCESS = 708 c"hipErrorSetOnActiveProcess": c"too late: the device is in use",
    CONTEXT_IS_DESTROYED = 709 c"hipErrorContextIsDestroyed": c"destroyed, or never created",
    ASSERT = 710 c"hipErrorAssert": c"a kernel's assertion failed",
    HOST_MEMORY_ALREADY_REGISTERED = 712 c"hipErrorHostMemoryAlreadyRegistered": c"the host memory is registered already",
    HOST_MEMORY_NOT_REGISTERED = 713 c"hipErrorHostMemoryNotRegistered": c"the host memory is not registered",
    LAUNCH_FAILURE = 719 c"hipErrorLaunchFailure": c"a kernel failed",
    COOPERATIVE_LAUNCH_TOO_LARGE = 720 c"hipErrorCooperativeLaunchTooLarge": c"the grid is too large for a cooperative launch",
    NOT_SUPPORTED = 801 c"hipErrorNotSupported": c"not supported",
    STREAM_CAPTURE_UNSUPPORTED = 900 c"hipErrorStreamCaptureUnsupported": c"not permitted while a stream is captured",
    STREAM_CAPTURE_INVALIDATED = 901 c"hipErrorStreamCaptureInvalidated": c"the capture was invalidated before",
    STREAM_CAPTURE_MERGE = 902 c"hipErrorStreamCaptureMerge": c"two captures would merge",
    STREAM_CAPTURE_UNMATCHED = 903 c"hipErrorStreamCaptureUnmatched": c"the capture began on another stream",
    STREAM_CAPTURE_UNJOINED = 904 c"hipErrorStreamCaptureUnjoined": c"a forked stream was not joined",
    STREAM_CAPTURE_ISOLATION = 905 c"hipErrorStreamCaptureIsolation": c"a dependency crosses the capture's border",
    STREAM_CAPTURE_IMPLICIT = 906 c"hipErrorStreamCaptureImplicit": c"an implicit dependency on a capture",
    CAPTURED_EVENT = 907 c"hipErrorCapturedEvent": c"the event belongs to a capture",
    STREAM_CAPTURE_WRONG_THREAD = 908 c"hipErrorStreamCaptureWrongThread": c"the capture began in another thread",
    GRAPH_EXEC_UPDATE_FAILURE = 910 c"hipErrorGraphExecUpdateFailure": c"the graph cannot be updated so",
    INVALID_CHANNEL_DESCRIPTOR = 911 c"hipErrorInvalidChannelDescriptor": c"invalid channel descriptor",
    INVALID_TEXTURE = 912 c"hipErrorInvalidTexture": c"invalid texture",
    UNKNOWN = 999 c"hipErrorUnknown": c"unknown error",
    RUNTIME_MEMORY = 1052 c"hipErrorRuntimeMemory": c"memory call of the runtime failed",
    RUNTIME_OTHER = 1053 c"hipErrorRuntimeOther": c"call of the runtime failed",
}

/// The constant's name in HIP's headers; the unknown error's for an unassigned code.
pub(crate) fn name(code: c_int) -> &'static CStr {
    if code == SUCCESS { c"hipSuccess" } else { find(code).map_or(c"hipErrorUnknown", |(_, name, _)| name) }
}

/// What a code means.
pub(crate) fn text(code: c_int) -> &'static CStr {
    if code == SUCCESS { c"no error" } else { find(code).map_or(c"unknown error", |(_, _, text)| text) }
}

/// Whether there is such a code.
pub(crate) fn known(code: c_int) -> bool {
    code == SUCCESS || find(code).is_some()
}

fn find(code: c_int) -> Option<&'static (c_int, &'static CStr, &'static CStr)> {
    TABLE.iter().find(|(c, ..)| *c == code)
}
