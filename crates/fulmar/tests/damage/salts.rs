//! SCRAM salts of unknown users are as stable as those of existing users. Otherwise clients could
//! find out which users exist.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;

/// Size of a message header: its type and its length.
const HEADER_BYTES: usize = 5;

fn read_message(stream: &mut TcpStream) -> Vec<u8> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    assert_eq!(header[0], b'R', "expected an authentication message");
    let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
    let mut body = vec![0; length as usize - 4];
    stream.read_exact(&mut body).unwrap();
    body
}

/// Returns the salt and the iteration count that the node sends for a user.
fn challenge(node: &Node, user: &str) -> String {
    let mut stream = TcpStream::connect(&node.sql).unwrap();
    let mut startup = 196_608_u32.to_be_bytes().to_vec();
    startup.extend_from_slice(format!("user\0{user}\0database\0shop\0\0").as_bytes());
    let length = (startup.len() as u32 + 4).to_be_bytes();
    stream.write_all(&[&length[..], &startup].concat()).unwrap();
    assert!(read_message(&mut stream).starts_with(&10_u32.to_be_bytes()), "expected AuthenticationSASL");
    let first = b"n,,n=,r=abcdefghijklmnopqrstuvwx";
    let body = [b"SCRAM-SHA-256\0", &(first.len() as u32).to_be_bytes()[..], first].concat();
    let length = (body.len() as u32 + 4).to_be_bytes();
    stream.write_all(&[b"p", &length[..], &body].concat()).unwrap();
    let response = String::from_utf8(read_message(&mut stream).split_off(4)).unwrap();
    response.split_once(',').unwrap().1.to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn salts_of_unknown_users_are_stable_across_restarts() {
    let rig = Rig::new(None);
    let users = ["ada", "absent", "missing"];
    let node = rig.start(&[]).unwrap();
    let system = log_in(&node, "fulmar", &rig.password(), "fulmar").await.unwrap();
    system.batch_execute("CREATE USER ada PASSWORD 'secret-of-ada'").await.unwrap();
    let before = users.map(|user| challenge(&node, user));
    drop(system);
    assert_eq!(node.stop_with(Signal::KILL), None);
    let node = rig.start(&[]).unwrap();
    assert_eq!(users.map(|user| challenge(&node, user)), before);
    let shape = |challenge: &String| (challenge.len(), challenge.split_once(",i=").unwrap().1.to_owned());
    assert_eq!(before.each_ref().map(shape), std::array::from_fn(|_| shape(&before[0])));
    assert_ne!(before[1], before[2]);
}
