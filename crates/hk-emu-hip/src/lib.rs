#![doc = include_str!("../README.md")]

mod abi;
mod capture;
mod device;
mod error;
mod graph;
mod graph_api;
mod heap;
mod hiprtc;
mod hiprtc_link;
mod host;
mod hostcall;
mod image;
mod ipc;
mod lookup;
mod managed;
mod memory;
mod module;
mod pool;
mod printf;
mod queue;
mod register;
mod runtime;
mod sanitize;
mod spt;
mod stats;
mod stream;
mod time;
mod unsupported;
mod virtual_memory;
mod volume;
mod work;

/// The exported functions that work, by topic.
pub fn supported() -> Vec<(&'static str, Vec<&'static str>)> {
    let group = |title, lists: &[&[&'static str]]| (title, lists.concat());
    vec![
        group("devices, contexts, errors", &[device::NAMES, device::MORE_NAMES]),
        group(
            "memory",
            &[memory::NAMES, volume::NAMES, pool::NAMES, managed::NAMES, ipc::NAMES, virtual_memory::NAMES],
        ),
        group("streams, events", &[stream::NAMES, stream::MORE_NAMES]),
        group("graphs, capture", &[capture::NAMES, graph_api::NAMES]),
        group("modules, launches", &[module::NAMES, module::MORE_NAMES]),
        group("embedded code", &[register::NAMES, register::MORE_NAMES]),
        group("per-thread default stream", &[spt::NAMES]),
        group("hiprtc", &[hiprtc::NAMES, hiprtc_link::NAMES, hiprtc::MORE_NAMES]),
        group("other", &[lookup::NAMES, unsupported::OTHER_NAMES]),
    ]
}

/// The exported functions that return `hipErrorNotSupported`, some after a check of their arguments.
pub fn unsupported() -> Vec<&'static str> {
    [unsupported::NAMES, unsupported::REFUSED_NAMES].concat()
}
