//! Functions that take the calling thread's own stream for the null stream: what programs call that are compiled for
//! such a default stream.

use std::ffi::{c_int, c_uint};

use crate::abi::{Dim3, Memcpy3D, PitchedPtr, Size3};
use crate::capture::*;
use crate::error::{HipError, Result, SUCCESS};
use crate::graph_api::*;
use crate::memory::*;
use crate::register::*;
use crate::runtime::api;
use crate::stream::*;
use crate::volume::*;

fn own(stream: u64) -> u64 {
    if stream == 0 { PER_THREAD } else { stream }
}

fn result(code: c_int) -> Result {
    if code == SUCCESS { Ok(()) } else { Err(HipError(code)) }
}

api! {
    fn hipEventRecord_spt(event: u64, on: u64) { result(hipEventRecord(event, own(on))) }

    fn hipLaunchHostFunc_spt(on: u64, function: Option<HostFunction>, data: u64) {
        result(hipLaunchHostFunc(own(on), function, data))
    }

    fn hipLaunchKernel_spt(function: u64, grid: Dim3, block: Dim3, params: u64, dynamic_lds: u64, on: u64) {
        result(hipLaunchKernel(function, grid, block, params, dynamic_lds, own(on)))
    }

    fn hipLaunchCooperativeKernel_spt(
        function: u64,
        grid: Dim3,
        block: Dim3,
        params: u64,
        dynamic_lds: c_uint,
        on: u64,
    ) {
        result(hipLaunchCooperativeKernel(function, grid, block, params, dynamic_lds, own(on)))
    }

    fn hipMemcpy_spt(dst: u64, src: u64, bytes: u64, kind: c_int) { result(hipMemcpy(dst, src, bytes, kind)) }

    fn hipMemcpyAsync_spt(dst: u64, src: u64, bytes: u64, kind: c_int, on: u64) {
        result(hipMemcpyAsync(dst, src, bytes, kind, own(on)))
    }

    fn hipMemcpy2D_spt(dst: u64, dst_pitch: u64, src: u64, src_pitch: u64, width: u64, height: u64, kind: c_int) {
        result(hipMemcpy2D(dst, dst_pitch, src, src_pitch, width, height, kind))
    }

    fn hipMemcpy2DAsync_spt(
        dst: u64,
        dst_pitch: u64,
        src: u64,
        src_pitch: u64,
        width: u64,
        height: u64,
        kind: c_int,
        on: u64,
    ) {
        result(hipMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, kind, own(on)))
    }

    fn hipMemcpyFromSymbol_spt(dst: u64, symbol: u64, bytes: u64, offset: u64, kind: c_int) {
        result(hipMemcpyFromSymbol(dst, symbol, bytes, offset, kind))
    }

    fn hipMemcpyFromSymbolAsync_spt(dst: u64, symbol: u64, bytes: u64, offset: u64, kind: c_int, on: u64) {
        result(hipMemcpyFromSymbolAsync(dst, symbol, bytes, offset, kind, own(on)))
    }

    fn hipMemcpyToSymbol_spt(symbol: u64, src: u64, bytes: u64, offset: u64, kind: c_int) {
        result(hipMemcpyToSymbol(symbol, src, bytes, offset, kind))
    }

    fn hipMemcpyToSymbolAsync_spt(symbol: u64, src: u64, bytes: u64, offset: u64, kind: c_int, on: u64) {
        result(hipMemcpyToSymbolAsync(symbol, src, bytes, offset, kind, own(on)))
    }

    fn hipMemset_spt(dst: u64, value: c_int, bytes: u64) { result(hipMemset(dst, value, bytes)) }

    fn hipMemsetAsync_spt(dst: u64, value: c_int, bytes: u64, on: u64) {
        result(hipMemsetAsync(dst, value, bytes, own(on)))
    }

    fn hipMemset2D_spt(dst: u64, pitch: u64, value: c_int, width: u64, height: u64) {
        result(hipMemset2D(dst, pitch, value, width, height))
    }

    fn hipMemset2DAsync_spt(dst: u64, pitch: u64, value: c_int, width: u64, height: u64, on: u64) {
        result(hipMemset2DAsync(dst, pitch, value, width, height, own(on)))
    }

    fn hipMemcpy3D_spt(p: *const Memcpy3D) { result(hipMemcpy3D(p)) }
    fn hipMemcpy3DAsync_spt(p: *const Memcpy3D, on: u64) { result(hipMemcpy3DAsync(p, own(on))) }
    fn hipMemset3D_spt(p: PitchedPtr, value: c_int, extent: Size3) { result(hipMemset3D(p, value, extent)) }

    fn hipMemset3DAsync_spt(p: PitchedPtr, value: c_int, extent: Size3, on: u64) {
        result(hipMemset3DAsync(p, value, extent, own(on)))
    }

    fn hipGraphLaunch_spt(exec: u64, on: u64) { result(hipGraphLaunch(exec, own(on))) }
    fn hipStreamBeginCapture_spt(on: u64, mode: c_int) { result(hipStreamBeginCapture(own(on), mode)) }
    fn hipStreamEndCapture_spt(on: u64, graph: *mut u64) { result(hipStreamEndCapture(own(on), graph)) }

    fn hipStreamGetCaptureInfo_spt(on: u64, status: *mut c_int, id: *mut u64) {
        result(hipStreamGetCaptureInfo(own(on), status, id))
    }

    fn hipStreamGetCaptureInfo_v2_spt(
        on: u64,
        status: *mut c_int,
        id: *mut u64,
        graph: *mut u64,
        dependencies: *mut u64,
        count: *mut u64,
    ) {
        result(hipStreamGetCaptureInfo_v2(own(on), status, id, graph, dependencies, count))
    }

    fn hipStreamAddCallback_spt(on: u64, function: Option<Callback>, data: u64, flags: c_uint) {
        result(hipStreamAddCallback(own(on), function, data, flags))
    }

    fn hipStreamGetFlags_spt(on: u64, flags: *mut c_uint) { result(hipStreamGetFlags(own(on), flags)) }
    fn hipStreamGetPriority_spt(on: u64, priority: *mut c_int) { result(hipStreamGetPriority(own(on), priority)) }
    fn hipStreamIsCapturing_spt(on: u64, status: *mut c_int) { result(hipStreamIsCapturing(own(on), status)) }
    fn hipStreamQuery_spt(on: u64) { result(hipStreamQuery(own(on))) }
    fn hipStreamSynchronize_spt(on: u64) { result(hipStreamSynchronize(own(on))) }

    fn hipStreamWaitEvent_spt(on: u64, event: u64, flags: c_uint) {
        result(hipStreamWaitEvent(own(on), event, flags))
    }
}
