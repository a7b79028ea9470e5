package nccl

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Both ends of a connection between hosts prove that they know the job's data key, over each other's challenge, before anything else is said:
//
//	dialler  "gorundp1", its challenge (32 bytes), the communicator (16), its rank and the one it wants (4 each)
//	receiver its challenge (32), HMAC-SHA256 of "receiver" and all that was said
//	dialler  HMAC-SHA256 of "dialler" and all that was said
//
// What follows is not encrypted.
const proofMagic = "gorundp1"

const (
	challengeSize = 32
	proofHello    = len(proofMagic) + challengeSize + 16 + 4 + 4
)

var errNoKey = errors.New("it does not know the job's key")

func proof(key []byte, who string, said []byte) []byte {
	h := hmac.New(sha256.New, key)
	io.WriteString(h, who)
	h.Write(said)
	return h.Sum(nil)
}

// offerProof is the dialler's side.
func offerProof(conn io.ReadWriter, key, comm []byte, rank, to int) error {
	said := make([]byte, 0, proofHello+challengeSize)
	said = append(said, proofMagic...)
	said = said[:len(proofMagic)+challengeSize]
	rand.Read(said[len(proofMagic):])
	said = append(said, comm[:16]...)
	said = binary.LittleEndian.AppendUint32(said, uint32(rank))
	said = binary.LittleEndian.AppendUint32(said, uint32(to))
	if _, err := conn.Write(said); err != nil {
		return err
	}
	var answer [challengeSize + sha256.Size]byte
	if _, err := io.ReadFull(conn, answer[:]); err != nil {
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			err = errors.New("it refused this rank")
		}
		return err
	}
	said = append(said, answer[:challengeSize]...)
	if !hmac.Equal(answer[challengeSize:], proof(key, "receiver", said)) {
		return errNoKey
	}
	_, err := conn.Write(proof(key, "dialler", said))
	return err
}

// acceptProof is the receiver's side. It returns the rank of the dialler.
func acceptProof(conn io.ReadWriter, key, comm []byte, own int) (rank int, err error) {
	said := make([]byte, proofHello, proofHello+challengeSize)
	if _, err := io.ReadFull(conn, said); err != nil {
		return 0, fmt.Errorf("it does not say who it is: %w", err)
	}
	if string(said[:len(proofMagic)]) != proofMagic {
		return 0, errors.New("it is no rank of a job")
	}
	named := said[len(proofMagic)+challengeSize:]
	if string(named[:16]) != string(comm[:16]) || int(binary.LittleEndian.Uint32(named[20:])) != own {
		return 0, errors.New("it looks for another communicator")
	}
	var challenge [challengeSize]byte
	rand.Read(challenge[:])
	said = append(said, challenge[:]...)
	if _, err := conn.Write(append(challenge[:], proof(key, "receiver", said)...)); err != nil {
		return 0, err
	}
	var answer [sha256.Size]byte
	if _, err := io.ReadFull(conn, answer[:]); err != nil {
		return 0, fmt.Errorf("%w: %w", errNoKey, err)
	}
	if !hmac.Equal(answer[:], proof(key, "dialler", said)) {
		return 0, errNoKey
	}
	return int(int32(binary.LittleEndian.Uint32(named[16:]))), nil
}
