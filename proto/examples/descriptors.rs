//! Prints the encoded `FileDescriptorSet` of csi.proto, for tests/go/proto.

use std::io::Write;

fn main() -> std::io::Result<()> {
    std::io::stdout().write_all(csi_proto::FILE_DESCRIPTOR_SET)
}
