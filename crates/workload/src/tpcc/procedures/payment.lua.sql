CREATE OR REPLACE PROCEDURE tpcc_payment(
    w INTEGER, d INTEGER, cw INTEGER, cd INTEGER, c INTEGER, last_name TEXT, amount BIGINT)
RETURNS TABLE (
    customer_number INTEGER, first_name TEXT, customer_last_name TEXT, credit TEXT, discount INTEGER,
    balance_cents BIGINT, warehouse_name TEXT, district_name TEXT)
LANGUAGE lua AS $$
    local found
    if c == 0 then
        local rows = db.query("SELECT rowid AS place, c_id FROM customer \
            WHERE c_w_id = $1 AND c_d_id = $2 AND c_last = $3 ORDER BY c_first", cw, cd, last_name)
        found = rows[(#rows + 1) // 2]
        c = found.c_id
    else
        found = db.query("SELECT rowid AS place FROM customer \
            WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3", cw, cd, c)[1]
    end
    local customer = db.query("SELECT c_credit, c_first, c_middle, c_last, c_street_1, c_street_2, c_city, \
        c_state, c_zip, c_phone, c_since, c_credit_lim, c_discount, c_balance \
        FROM customer WHERE rowid = $1", found.place)[1]
    if customer.c_credit == "BC" then
        local note = table.concat({ c, cd, cw, d, w, amount }, " ") .. " | "
        db.exec("UPDATE customer SET c_balance = c_balance - $2, c_ytd_payment = c_ytd_payment + $2, \
            c_payment_cnt = c_payment_cnt + 1, c_data = substr($3 || c_data, 1, 500) WHERE rowid = $1",
            found.place, amount, note)
    else
        db.exec("UPDATE customer SET c_balance = c_balance - $2, c_ytd_payment = c_ytd_payment + $2, \
            c_payment_cnt = c_payment_cnt + 1 WHERE rowid = $1", found.place, amount)
    end
    local district = db.query("SELECT rowid AS place, d_name, d_street_1, d_street_2, d_city, d_state, d_zip \
        FROM district WHERE d_w_id = $1 AND d_id = $2", w, d)[1]
    db.exec("UPDATE district SET d_ytd = d_ytd + $2 WHERE rowid = $1", district.place, amount)
    local warehouse = db.query("SELECT w_name, w_street_1, w_street_2, w_city, w_state, w_zip \
        FROM warehouse WHERE w_id = $1", w)[1]
    db.exec("UPDATE warehouse SET w_ytd = w_ytd + $2 WHERE w_id = $1", w, amount)
    db.exec("INSERT INTO history (h_c_id, h_c_d_id, h_c_w_id, h_d_id, h_w_id, h_date, h_amount, h_data) \
        VALUES ($1, $2, $3, $4, $5, CURRENT_TIMESTAMP, $6, $7)",
        c, cd, cw, d, w, amount, warehouse.w_name .. "    " .. district.d_name)
    return {
        customer_number = c, first_name = customer.c_first, customer_last_name = customer.c_last,
        credit = customer.c_credit, discount = customer.c_discount, balance_cents = customer.c_balance - amount,
        warehouse_name = warehouse.w_name, district_name = district.d_name,
    }
$$
