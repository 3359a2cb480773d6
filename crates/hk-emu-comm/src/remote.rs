//! Ranks of other processes: a request is a connection to the process of the unique id, which does what is asked and answers.

use crate::Failure;
use crate::hub::{Blob, Caller, Request};
use std::io;

/// Does what a rank asks for in the process of that name.
pub(crate) fn ask(process: &[u8; 16], caller: &Caller, request: &Request) -> Result<Vec<Blob>, Failure> {
    let answer = socket::exchange(process, &encode_request(caller, request));
    let wrong = |error: io::Error| Failure::Transport(error.to_string());
    decode_answer(&mut Reader(&answer.map_err(wrong)?))
        .ok_or_else(|| Failure::Transport("a wrong answer".into()))?
}

/// Answers ranks of other processes from now on; again is nothing.
pub(crate) fn serve(process: &[u8; 16]) -> Result<(), Failure> {
    socket::serve(process, answer).map_err(|error| Failure::Transport(error.to_string()))
}

fn answer(request: &[u8]) -> Vec<u8> {
    let result = match decode_request(&mut Reader(request)) {
        Some((caller, request)) => crate::hub::handle(&caller, request),
        None => Err(Failure::Invalid("a wrong request".into())),
    };
    encode_answer(&result)
}

#[cfg(target_os = "linux")]
mod socket {
    use std::fmt::Write as _;
    use std::io::{self, Read, Write};
    use std::net::Shutdown;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::sync::Mutex;
    use std::sync::PoisonError;

    /// In the abstract namespace: it goes with the process.
    fn address(process: &[u8; 16]) -> io::Result<SocketAddr> {
        let mut name = "hk-rccl-".to_owned();
        for byte in process {
            let _ = write!(name, "{byte:02x}");
        }
        SocketAddr::from_abstract_name(name)
    }

    pub fn exchange(process: &[u8; 16], request: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect_addr(&address(process)?)?;
        stream.write_all(request)?;
        stream.shutdown(Shutdown::Write)?;
        let mut answer = vec![];
        stream.read_to_end(&mut answer)?;
        Ok(answer)
    }

    pub fn serve(process: &[u8; 16], answer: fn(&[u8]) -> Vec<u8>) -> io::Result<()> {
        static SERVES: Mutex<bool> = Mutex::new(false);
        let mut serves = SERVES.lock().unwrap_or_else(PoisonError::into_inner);
        if *serves {
            return Ok(());
        }
        let listener = UnixListener::bind_addr(&address(process)?)?;
        let one = move |mut stream: UnixStream| -> io::Result<()> {
            let mut request = vec![];
            stream.read_to_end(&mut request)?;
            stream.write_all(&answer(&request))
        };
        // Each with a thread: an answer may have to wait for the requests of others.
        let all = move || {
            for stream in listener.incoming().flatten() {
                // A rank that is gone wants no answer, and one that gets none reports it.
                let _ = std::thread::Builder::new().name("hk-emu-comm".into()).spawn(move || one(stream));
            }
        };
        std::thread::Builder::new().name("hk-emu-comm server".into()).spawn(all)?;
        *serves = true;
        Ok(())
    }
}

#[cfg(not(target_os = "linux"))]
mod socket {
    use std::io;

    pub fn exchange(_: &[u8; 16], _: &[u8]) -> io::Result<Vec<u8>> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "ranks in several processes are for Linux"))
    }

    /// Ranks of this process need no socket.
    pub fn serve(_: &[u8; 16], _: fn(&[u8]) -> Vec<u8>) -> io::Result<()> {
        Ok(())
    }
}

/// Numbers and blobs, little-endian, each blob behind its length.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn number(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }

    fn index(&mut self) -> Option<usize> {
        self.number()?.try_into().ok()
    }

    fn blob(&mut self) -> Option<&'a [u8]> {
        let (blob, rest) = self.index().and_then(|len| self.0.split_at_checked(len))?;
        self.0 = rest;
        Some(blob)
    }

    fn text(&mut self) -> Option<String> {
        self.blob().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }
}

fn put(out: &mut Vec<u8>, number: u64) {
    out.extend(number.to_le_bytes());
}

fn put_blob(out: &mut Vec<u8>, blob: &[u8]) {
    put(out, blob.len() as u64);
    out.extend(blob);
}

fn encode_request(caller: &Caller, request: &Request) -> Vec<u8> {
    let mut out = vec![];
    put_blob(&mut out, &caller.key);
    put(&mut out, caller.rank as u64);
    // One more than milliseconds, 0 for none.
    let ms = caller.timeout.map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX).saturating_add(1));
    put(&mut out, ms.unwrap_or(0));
    let (tag, number, blob): (u64, u64, &[u8]) = match request {
        Request::Join(world) => (0, *world as u64, &[]),
        Request::Exchange(blob) => (1, 0, blob),
        Request::Post(to, blob) => (2, *to as u64, blob),
        Request::Take(from) => (3, *from as u64, &[]),
        Request::Taken(to, number) => (4, *to as u64, &number.to_le_bytes()),
        Request::Abort => (5, 0, &[]),
        Request::Leave => (6, 0, &[]),
    };
    put(&mut out, tag);
    put(&mut out, number);
    put_blob(&mut out, blob);
    out
}

fn decode_request(reader: &mut Reader) -> Option<(Caller, Request)> {
    let (key, rank) = (reader.blob()?.to_vec(), reader.index()?);
    let timeout = reader.number()?.checked_sub(1).map(std::time::Duration::from_millis);
    let (tag, number, blob) = (reader.number()?, reader.index()?, reader.blob()?);
    let request = match tag {
        0 => Request::Join(number),
        1 => Request::Exchange(blob.into()),
        2 => Request::Post(number, blob.into()),
        3 => Request::Take(number),
        4 => Request::Taken(number, u64::from_le_bytes(blob.try_into().ok()?)),
        5 => Request::Abort,
        6 => Request::Leave,
        _ => return None,
    };
    Some((Caller { key, rank, timeout }, request))
}

fn encode_answer(answer: &Result<Vec<Blob>, Failure>) -> Vec<u8> {
    let mut out = vec![];
    match answer {
        Ok(blobs) => {
            put(&mut out, 0);
            put(&mut out, blobs.len() as u64);
            blobs.iter().for_each(|blob| put_blob(&mut out, blob));
        }
        Err(failure) => {
            let (tag, numbers, texts): (u64, [usize; 2], [&str; 2]) = match failure {
                Failure::Timeout { missing } => (1, [*missing, 0], [""; 2]),
                Failure::Aborted => (2, [0; 2], [""; 2]),
                Failure::Mismatch { rank, own, other, other_call } => (3, [*rank, *other], [own, other_call]),
                Failure::Left { rank } => (4, [*rank, 0], [""; 2]),
                Failure::Invalid(text) => (5, [0; 2], [text, ""]),
                Failure::Memory(text) => (6, [0; 2], [text, ""]),
                Failure::Transport(text) => (7, [0; 2], [text, ""]),
            };
            put(&mut out, tag);
            numbers.into_iter().for_each(|number| put(&mut out, number as u64));
            texts.into_iter().for_each(|text| put_blob(&mut out, text.as_bytes()));
        }
    }
    out
}

fn decode_answer(reader: &mut Reader) -> Option<Result<Vec<Blob>, Failure>> {
    let tag = reader.number()?;
    if tag == 0 {
        let blobs = (0..reader.number()?).map(|_| reader.blob().map(Blob::from)).collect::<Option<_>>()?;
        return Some(Ok(blobs));
    }
    let (rank, other) = (reader.index()?, reader.index()?);
    let (own, other_call) = (reader.text()?, reader.text()?);
    Some(Err(match tag {
        1 => Failure::Timeout { missing: rank },
        2 => Failure::Aborted,
        3 => Failure::Mismatch { rank, own, other, other_call },
        4 => Failure::Left { rank },
        5 => Failure::Invalid(own),
        6 => Failure::Memory(own),
        7 => Failure::Transport(own),
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let caller = |timeout| Caller { key: b"key".into(), rank: 3, timeout };
        let blob = Blob::from([1u8, 2, 3]);
        for request in [
            Request::Join(4),
            Request::Exchange(blob.clone()),
            Request::Post(2, blob.clone()),
            Request::Take(1),
            Request::Taken(1, 9),
            Request::Abort,
            Request::Leave,
        ] {
            for timeout in [None, Some(Duration::ZERO), Some(Duration::from_secs(5))] {
                let bytes = encode_request(&caller(timeout), &request);
                assert_eq!(decode_request(&mut Reader(&bytes)), Some((caller(timeout), request.clone())));
                assert_eq!(decode_request(&mut Reader(&bytes[..bytes.len() - 1])), None);
            }
        }
        let mismatch = Failure::Mismatch { rank: 1, own: "a".into(), other: 2, other_call: "b".into() };
        for answer in [
            Ok(vec![]),
            Ok(vec![blob.clone(), Blob::from([])]),
            Err(Failure::Timeout { missing: 7 }),
            Err(Failure::Aborted),
            Err(mismatch),
            Err(Failure::Left { rank: 1 }),
            Err(Failure::Invalid("i".into())),
            Err(Failure::Memory("m".into())),
            Err(Failure::Transport("t".into())),
        ] {
            let bytes = encode_answer(&answer);
            assert_eq!(decode_answer(&mut Reader(&bytes)), Some(answer));
        }
    }
}
