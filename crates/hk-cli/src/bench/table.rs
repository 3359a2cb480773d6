//! What was measured, as rows: printed, and in CSV files.

use crate::out::Table;
use crate::{Failure, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A case on a device. Times are of one call, in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub operator: String,
    pub case: String,
    /// Of the first input.
    pub dtype: String,
    pub device: String,
    /// That any implementation moves: each input read once, each output written once.
    pub bytes: u64,
    /// Of a GEMM.
    pub flops: Option<u64>,
    /// Copies of the operands, used in turn.
    pub copies: usize,
    /// Median of the device's time, with operands that no cache holds.
    pub device_us: f64,
    pub device_us_p10: f64,
    pub device_us_p90: f64,
    /// Median of the device's time, with the same operands again and again.
    pub cached_us: f64,
    /// Median of the host's time to queue a call.
    pub launch_us: f64,
    /// Median of the host's time until the device is done, launches included.
    pub host_us: f64,
    /// What the device copies, in the same run; bytes read and bytes written both count.
    pub copy_gb_s: Option<f64>,
    /// What the device's matrix units do, as published.
    pub matrix_tflop_s: Option<f64>,
}

/// What another implementation took for a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    pub operator: String,
    pub case: String,
    pub dtype: String,
    pub peer: String,
    pub device_us: f64,
    pub cached_us: f64,
    pub launch_us: f64,
    pub host_us: f64,
}

impl Row {
    pub fn gb_s(&self) -> f64 {
        self.bytes as f64 / self.device_us / 1e3
    }

    pub fn tflop_s(&self) -> Option<f64> {
        Some(self.flops? as f64 / self.device_us / 1e6)
    }

    pub fn of_copy(&self) -> Option<f64> {
        Some(self.gb_s() / self.copy_gb_s?)
    }

    pub fn of_matrix(&self) -> Option<f64> {
        Some(self.tflop_s()? / self.matrix_tflop_s?)
    }

    /// Share of what bounds it: the copy rate, or for a GEMM that of the matrix units if that is the larger share.
    pub fn of_bound(&self) -> Option<f64> {
        Some(self.of_copy()?.max(self.of_matrix().unwrap_or(0.0)))
    }

    pub fn is(&self, peer: &Peer) -> bool {
        (&self.operator, &self.case, &self.dtype) == (&peer.operator, &peer.case, &peer.dtype)
    }
}

/// The names of the peers, in the order in which they first come.
pub fn names(peers: &[Peer]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for peer in peers {
        if !names.contains(&peer.peer.as_str()) {
            names.push(&peer.peer);
        }
    }
    names
}

fn find<'a>(row: &Row, peers: &'a [Peer], name: &str) -> Option<&'a Peer> {
    peers.iter().find(|p| p.peer == name && row.is(p))
}

/// The table to be printed: of each peer, its time over this library's.
pub fn table(rows: &[Row], peers: &[Peer]) -> Table {
    let names = names(peers);
    let mut headers: Vec<String> = [
        "operator",
        "case",
        "dtype",
        ">MiB",
        ">GFLOP",
        ">us",
        ">10..90 %",
        ">cached us",
        ">launch us",
        ">host us",
        ">GB/s",
        ">of copy",
        ">TFLOP/s",
        ">of matrix",
    ]
    .map(String::from)
    .into();
    headers.extend(names.iter().map(|name| format!(">{name} / hk")));
    let mut table = Table::new(headers.iter().map(String::as_str));
    let percent = |share: Option<f64>| share.map_or("-".into(), |s| format!("{:.1} %", 100.0 * s));
    let number = |x: Option<f64>| x.map_or("-".into(), |x| format!("{x:.1}"));
    for row in rows {
        let mut cells = vec![
            row.operator.clone(),
            row.case.clone(),
            row.dtype.clone(),
            format!("{:.1}", row.bytes as f64 / f64::from(1 << 20)),
            number(row.flops.map(|f| f as f64 / 1e9)),
            format!("{:.2}", row.device_us),
            format!("{:.2}..{:.2}", row.device_us_p10, row.device_us_p90),
            format!("{:.2}", row.cached_us),
            format!("{:.2}", row.launch_us),
            format!("{:.2}", row.host_us),
            format!("{:.0}", row.gb_s()),
            percent(row.of_copy()),
            number(row.tflop_s()),
            percent(row.of_matrix()),
        ];
        cells.extend(names.iter().map(|name| {
            find(row, peers, name).map_or("-".into(), |p| format!("{:.2}", p.device_us / row.device_us))
        }));
        table.row(cells);
    }
    table
}

/// Writes the rows, with the shares of the device's rates, and of each peer its times and its device time over this
/// library's.
pub fn write(path: &Path, rows: &[Row], peers: &[Peer]) -> Result<()> {
    let names = names(peers);
    let failed = |e: csv::Error| Failure::file(path, e);
    let mut file = csv::Writer::from_path(path).map_err(failed)?;
    let mut header: Vec<String> = [
        "operator",
        "case",
        "dtype",
        "device",
        "bytes",
        "flops",
        "copies",
        "device_us",
        "device_us_p10",
        "device_us_p90",
        "cached_us",
        "launch_us",
        "host_us",
        "copy_gb_s",
        "matrix_tflop_s",
        "gb_s",
        "of_copy",
        "tflop_s",
        "of_matrix",
    ]
    .map(String::from)
    .into();
    for name in &names {
        header.extend(
            ["us", "cached_us", "launch_us", "host_us", "ratio"].map(|column| format!("{name}_{column}")),
        );
    }
    file.write_record(&header).map_err(failed)?;
    let text = |x: Option<f64>| x.map_or(String::new(), |x| format!("{x:.4}"));
    for row in rows {
        let mut cells = vec![
            row.operator.clone(),
            row.case.clone(),
            row.dtype.clone(),
            row.device.clone(),
            row.bytes.to_string(),
            row.flops.map_or(String::new(), |f| f.to_string()),
            row.copies.to_string(),
        ];
        let times =
            [row.device_us, row.device_us_p10, row.device_us_p90, row.cached_us, row.launch_us, row.host_us]
                .map(Some);
        let rates = [
            row.copy_gb_s,
            row.matrix_tflop_s,
            Some(row.gb_s()),
            row.of_copy(),
            row.tflop_s(),
            row.of_matrix(),
        ];
        cells.extend(times.into_iter().chain(rates).map(text));
        for name in &names {
            let peer = find(row, peers, name);
            let of = |f: fn(&Peer) -> f64| text(peer.map(f));
            let ratio = text(peer.map(|p| p.device_us / row.device_us));
            cells.extend([
                of(|p| p.device_us),
                of(|p| p.cached_us),
                of(|p| p.launch_us),
                of(|p| p.host_us),
                ratio,
            ]);
        }
        file.write_record(&cells).map_err(failed)?;
    }
    file.flush().map_err(|e| Failure::file(path, e))
}

/// Reads rows or peers; columns that are not theirs are passed over.
pub fn read<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Vec<T>> {
    let failed = |e: csv::Error| Failure::file(path, e);
    csv::Reader::from_path(path).map_err(failed)?.deserialize().collect::<Result<_, _>>().map_err(failed)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn row() -> Row {
        Row {
            operator: "gemm_a16w16".into(),
            case: "Llama-3 8B, \"q\", 16 tokens".into(),
            dtype: "bf16".into(),
            device: "NVIDIA H200".into(),
            bytes: 4_000_000,
            flops: Some(2_000_000_000),
            copies: 3,
            device_us: 2.0,
            device_us_p10: 1.9,
            device_us_p90: 2.5,
            cached_us: 1.5,
            launch_us: 2.25,
            host_us: 4.25,
            copy_gb_s: Some(4000.0),
            matrix_tflop_s: Some(1250.0),
        }
    }

    pub fn peer(name: &str, device_us: f64) -> Peer {
        let Row { operator, case, dtype, .. } = row();
        Peer {
            operator,
            case,
            dtype,
            peer: name.into(),
            device_us,
            cached_us: 2.0,
            launch_us: 8.0,
            host_us: 9.0,
        }
    }

    #[test]
    fn rates_follow_from_bytes_and_flops() {
        let row = row();
        assert_eq!((row.gb_s(), row.of_copy()), (2000.0, Some(0.5)));
        assert_eq!((row.tflop_s(), row.of_matrix(), row.of_bound()), (Some(1000.0), Some(0.8), Some(0.8)));
        let unknown = Row { flops: None, copy_gb_s: None, ..row };
        assert_eq!((unknown.of_copy(), unknown.tflop_s(), unknown.of_bound()), (None, None, None));
    }

    #[test]
    fn files_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.csv");
        let rows = [row(), Row { flops: None, matrix_tflop_s: None, operator: "rmsnorm".into(), ..row() }];
        let peers = [peer("torch", 3.0), peer("triton", 1.0)];
        write(&path, &rows, &peers).unwrap();
        assert_eq!(read::<Row>(&path).unwrap(), rows);
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].ends_with(",torch_us,torch_cached_us,torch_launch_us,torch_host_us,torch_ratio,triton_us,triton_cached_us,triton_launch_us,triton_host_us,triton_ratio"));
        assert!(
            lines[1].ends_with(",3.0000,2.0000,8.0000,9.0000,1.5000,1.0000,2.0000,8.0000,9.0000,0.5000"),
            "{}",
            lines[1]
        );
        // Another operator than the peers'.
        assert!(lines[2].ends_with(",,,,,,,,,,"), "{}", lines[2]);

        let path = dir.path().join("peers.csv");
        std::fs::write(
            &path,
            "operator,case,dtype,peer,device_us,cached_us,launch_us,host_us,error\na,\"b, c\",bf16,torch,1,2,3,4,\n",
        )
        .unwrap();
        assert_eq!(read::<Peer>(&path).unwrap()[0].case, "b, c");
        std::fs::write(&path, "operator,case\na,b\n").unwrap();
        let error = read::<Peer>(&path).unwrap_err().to_string();
        assert!(error.contains("peers.csv") && error.contains("dtype"), "{error}");
    }

    #[test]
    fn the_table_has_a_column_for_each_peer() {
        let text = table(&[row()], &[peer("torch", 3.0)]).to_string();
        assert!(text.lines().next().unwrap().contains("torch / hk"), "{text}");
        assert!(text.contains("50.0 %") && text.contains("80.0 %") && text.contains("1.50"), "{text}");
    }
}
